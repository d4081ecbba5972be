"""`model+lora`: a checkpoint whose tensors come out with a PEFT adapter added, one at a time.

A read gives W + scaling * B @ A, computed in float32 (float64 for a float64 W) and rounded once to
W's dtype; with DoRA the rows are rescaled to the trained magnitudes. PEFT's own merge rounds the
product to W's dtype first, so the two may differ by a rounding of W's dtype, never more.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from moemerge.checkpoint.adapter import Adapter, LoraPair, listed, open_adapter
from moemerge.checkpoint.companions import companion_files
from moemerge.checkpoint.placement import Expand, Place, find_places
from moemerge.checkpoint.reader import SAMPLE_BYTES, Checkpoint, TensorFile
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError

__all__ = ["AdaptedCheckpoint", "Expand", "Place"]

CACHE_BYTES: Final = 256 * 2**20
_ADAPTABLE: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
# PEFT reads stacks of these families as (experts, in, out); it matters where they are square.
_TRANSPOSED_STACKS: Final = frozenset({"gpt_oss", "aria", "aria_text", "openai_privacy_filter"})


class _Factors:
    """Adapter tensors, of which the last used stay in memory: a stack asks once per expert."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._cache: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, name: str) -> Tensor:
        with self._lock:
            tensor = self._cache.pop(name, None)
            if tensor is None:
                tensor = self._file.read(name)
            self._cache[name] = tensor
            while sum(t.nbytes for t in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)
        return tensor


@dataclass(frozen=True)
class _Update:
    """One low-rank term for one place: rows `out` of B times A, for one expert of the pair."""

    pair: LoraPair
    place: Place
    out: slice  # the place's share of the pair's output axis
    expert: int | None
    experts: int

    def apply(self, block: Tensor, start: int, factors: _Factors) -> None:
        """Add to `block`, the rows of the stored tensor from `start` on."""
        a, b = self._matrices(factors, block.dtype)
        if self.place.row is not None:
            if not start <= self.place.row < start + block.shape[0]:
                return
            block = block[self.place.row - start]
        elif self.place.transposed:
            a = a[:, start : start + block.shape[0]]
        else:
            b = b[start : start + block.shape[0]]
        view = block.T if self.place.transposed else block  # (out, in)
        if self.place.part is not None:
            view = view[self.place.part]
        view.addmm_(b, a, alpha=self.pair.scaling)
        if self.pair.magnitude is not None:
            magnitude = factors(self.pair.magnitude).reshape(-1)  # (out,)
            rows = magnitude[start : start + view.shape[0]].to(view.dtype)
            view.mul_((rows / view.norm(dim=1))[:, None])

    def _matrices(self, factors: _Factors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = factors(self.pair.a), factors(self.pair.b)
        if self.expert is not None:  # PEFT: A is (experts * rank, in), B is (out, rank * experts)
            a = a.view(self.experts, -1, a.shape[1])[self.expert]
            b = b.view(b.shape[0], -1, self.experts)[:, :, self.expert]
        return a.to(dtype), b[self.out].to(dtype)


class AdaptedCheckpoint(Checkpoint):
    """A base checkpoint with one adapter on top; every adapter tensor is used, or it is refused."""

    def __init__(
        self, path: Path, adapter: Path, label: str | None = None, *, expand: Expand | None = None
    ) -> None:
        super().__init__(path, label if label is not None else f"{path}+{adapter}")
        try:
            self.adapter = open_adapter(adapter)
        except BaseException:
            super().close()
            raise
        try:
            self._bind(_Binding(self, self.adapter, expand))
        except BaseException:
            self.close()
            raise

    def _bind(self, binding: _Binding) -> None:
        binding.run()
        self._factors = _Factors(self.adapter.file)
        self._updates = binding.updates
        self._biases = binding.biases
        self._replaced = binding.replaced
        self._adopt_vocabulary(binding.infos)
        self.tensors = {**self.tensors, **binding.infos}

    def _adopt_vocabulary(self, infos: Mapping[str, TensorInfo]) -> None:
        """An adapter saved with resized embeddings changes the config's `vocab_size` too."""
        for name, info in infos.items():
            old = self.tensors[name].rows
            if info.rows != old and self.config.get("vocab_size") == old:
                self.config = {**self.config, "vocab_size": info.rows}

    def has_elements(self, name: str) -> bool:
        touched = name in self._updates or name in self._biases or name in self._replaced
        return not touched and super().has_elements(name)

    def read(
        self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        changed = name in self._updates or name in self._biases
        if name in self._replaced:
            block = self.adapter.file.read(self._replaced[name], rows).to(self.tensors[name].dtype)
        elif changed:
            block = super().read(name, rows)
        else:
            return super().read(name, rows, out)
        if changed:
            block = self._adapted(name, block, rows[0] if rows else 0)
        return block if out is None else out.copy_(block)

    def _adapted(self, name: str, block: Tensor, start: int) -> Tensor:
        work = block.to(torch.float64 if block.dtype == torch.float64 else torch.float32)
        for update in self._updates.get(name, ()):
            update.apply(work, start, self._factors)
        for pair in self._biases.get(name, ()):
            bias = self._factors(str(pair.bias))[start : start + work.shape[0]]
            work.add_(bias.to(work.dtype), alpha=pair.scaling)
        return work.to(block.dtype)

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.path, self.adapter.path)

    @property
    def tokenizer_folder(self) -> Path:
        """The adapter's, where it was saved with a tokenizer: it may have added tokens."""
        own = (self.adapter.path / "tokenizer.json").is_file()
        return self.adapter.path if own else self.path

    def companions(self) -> dict[str, Path]:
        """The base's files; a tokenizer or template saved with the adapter goes before."""
        return dict(sorted({**super().companions(), **companion_files(self.adapter.path)}.items()))

    def fingerprint(self) -> str:
        """The base's fingerprint, with the adapter's settings and tensors on top."""
        digest = hashlib.sha256(super().fingerprint().encode())
        digest.update(json.dumps(self.adapter.config, sort_keys=True).encode())
        for name in sorted(self.adapter.file.tensors):
            digest.update(name.encode() + self.adapter.file.sample(name, SAMPLE_BYTES))
        return digest.hexdigest()

    def close(self) -> None:
        super().close()
        self.adapter.file.close()


class _Binding:
    """Finds the places of all adapter tensors in a base checkpoint, and refuses what has none."""

    def __init__(self, base: Checkpoint, adapter: Adapter, expand: Expand | None) -> None:
        self._base = base
        self._adapter = adapter
        self._expand = expand
        self._shapes = adapter.file.tensors
        self.updates: dict[str, list[_Update]] = defaultdict(list)
        self.biases: dict[str, list[LoraPair]] = defaultdict(list)
        self.replaced: dict[str, str] = {}
        self.infos: dict[str, TensorInfo] = {}
        self._unmatched: set[str] = set()

    def run(self) -> None:
        for parameter, name in self._adapter.replacements.items():
            self._replace(parameter, name)
        for pair in self._adapter.pairs:
            self._add(pair)
        if self._unmatched:
            tied = self._base.config.get("tie_word_embeddings")
            raise CheckpointError(
                f"{len(self._unmatched)} tensors of the adapter {self._adapter.path} match nothing "
                f"in {self._base.path}: {listed(self._unmatched)}",
                hint="name the base model that the adapter was trained on"
                + ("; its output layer is tied to the embeddings, so it has none" if tied else ""),
            )

    def _places(self, parameter: str, expert: int | None, out: int) -> list[Place]:
        if self._expand is not None:
            found = list(self._expand(parameter, expert))
            if found:
                return found
        return list(find_places(parameter, expert, out, self._base.tensors))

    def _replace(self, parameter: str, name: str) -> None:
        given = self._shapes[name]
        places = self._places(parameter, None, given.rows)
        if len(places) != 1 or places[0].row is not None or places[0].part is not None:
            if not self._is_tied_copy(parameter, name):
                self._unmatched.add(name)
            return
        info = self._base.tensors[places[0].tensor]
        if len(info.shape) != len(given.shape) or info.shape[1:] != given.shape[1:]:
            raise CheckpointError(
                f"the adapter replaces {info.name!r} of shape {list(info.shape)} by {name!r} of "
                f"shape {list(given.shape)}; only the vocabulary may change",
                hint="name the base model that the adapter was trained on",
            )
        self.replaced[info.name] = name
        self.infos[info.name] = TensorInfo.of(info.name, info.dtype, given.shape)

    def _is_tied_copy(self, parameter: str, name: str) -> bool:
        """An output layer that the base does not store, saved as a copy of its embeddings."""
        twin = self._adapter.replacements.get("model.embed_tokens.weight")
        tied = self._base.config.get("tie_word_embeddings") and parameter == "lm_head.weight"
        file = self._adapter.file
        return bool(tied and twin and torch.equal(file.read(name), file.read(twin)))

    def _add(self, pair: LoraPair) -> None:
        a, b = self._shapes[pair.a].shape, self._shapes[pair.b].shape
        experts, left = divmod(a[0], pair.rank) if len(a) == len(b) == 2 and pair.rank else (0, 1)
        if left or b[1] != a[0]:
            raise CheckpointError(
                f"the adapter's {pair.a!r} and {pair.b!r} have shapes {list(a)} and {list(b)}, "
                f"expected (n, in) and (out, n) with n a multiple of the rank {pair.rank}",
                hint="adapters on convolutions are not supported; merge those with peft",
            )
        stacked = experts > 1 or self._is_stack(pair.parameter)
        for expert in range(experts) if stacked else (None,):
            self._add_matrix(pair, expert, experts, b[0], a[1])
        if pair.bias is not None:
            self._add_bias(pair)

    def _is_stack(self, parameter: str) -> bool:
        """Whether a pair on a parameter with one expert means a stack of one."""
        places = [p for p in self._places(parameter, None, 0) if p.row is None]
        infos = [self._base.tensors.get(place.tensor) for place in places]
        return any(info is not None and len(info.shape) == 3 for info in infos)

    def _add_matrix(
        self, pair: LoraPair, expert: int | None, experts: int, rows: int, columns: int
    ) -> None:
        places = self._places(pair.parameter, expert, rows)
        if not places or any(place.tensor not in self._base.tensors for place in places):
            self._unmatched.update(pair.names)
            return
        share, left = divmod(rows, len(places))
        for i, place in enumerate(places):
            oriented = None if left else self._oriented(pair, place, share, columns)
            if oriented is None:
                info = self._base.tensors[place.tensor]
                raise CheckpointError(
                    f"the adapter's pair for {pair.parameter!r} makes a {rows} x {columns} matrix, "
                    f"which does not fit {place.tensor!r} of shape {list(info.shape)}",
                    hint="name the base model that the adapter was trained on",
                )
            out = slice(i * share, (i + 1) * share)
            self.updates[place.tensor].append(_Update(pair, oriented, out, expert, experts))

    def _oriented(self, pair: LoraPair, place: Place, rows: int, columns: int) -> Place | None:
        """The place with its orientation decided, or None where a (rows, columns) term does not
        fit there."""
        info = self._base.tensors[place.tensor]
        shape = self.infos.get(info.name, info).shape
        matrix = shape if place.row is None else shape[1:]
        if info.dtype not in _ADAPTABLE:
            raise CheckpointError(
                f"the adapter changes {info.name!r}, which is stored as {info.dtype}",
                hint="dequantise the base model first",
            )
        if len(matrix) != 2 or (place.row is not None and place.row >= shape[0]):
            return None
        for transposed in self._orientations(pair, place):
            out, columns_here = matrix[::-1] if transposed else matrix
            if place.part is not None:
                out = len(range(*place.part.indices(out)))
            if (out, columns_here) == (rows, columns):
                return Place(place.tensor, place.row, place.part, transposed)
        return None

    def _orientations(self, pair: LoraPair, place: Place) -> tuple[bool, ...]:
        transposed = pair.embedding or self._adapter.settings.fan_in_fan_out
        if pair.magnitude is not None and (transposed or place != Place(place.tensor)):
            raise CheckpointError(
                f"the adapter uses DoRA on {pair.parameter!r}, an embedding, a transposed matrix "
                "or a part of a stack, where it is not supported",
                hint="merge the adapter with peft (merge_and_unload) and use the result",
            )
        if pair.embedding:  # A is (rank, vocabulary), B is (width, rank)
            return (True,)
        if place.transposed is not None:
            return (place.transposed,)
        if place.row is None:
            return (self._adapter.settings.fan_in_fan_out,)
        transposed = self._base.config.get("model_type") in _TRANSPOSED_STACKS
        return (transposed, not transposed)

    def _add_bias(self, pair: LoraPair) -> None:
        name = pair.parameter.removesuffix(".weight") + ".bias"
        places = self._places(name, None, self._shapes[str(pair.bias)].rows)
        if len(places) != 1 or places[0].row is not None:
            self._unmatched.add(str(pair.bias))
            return
        self.biases[places[0].tensor].append(pair)
