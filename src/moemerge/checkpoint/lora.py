"""Apply a PEFT adapter to the tensors of a checkpoint, one tensor at a time.

A read returns W + scaling * B @ A, computed in float32 (float64 for a float64 W) and rounded once
to W's dtype. With DoRA the rows are rescaled to the trained magnitudes. PEFT's own merge rounds the
product to W's dtype first, so the two may differ by one rounding step of W's dtype.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moemerge.checkpoint.adapter import Adapter, LoraPair
from moemerge.checkpoint.tensors import RowRange, TensorInfo
from moemerge.config.models import LORA_LAYOUTS
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import FLOATS
from moemerge.runtime.lazy import torch
from moemerge.runtime.progress import first_few

if TYPE_CHECKING:
    from torch import Tensor


CACHED: Final = 8  # tensors of the adapter in memory: a stack reads them once per expert
# Every version of PEFT reads stacks of these families as (experts, in, out).
TRANSPOSED_STACKS: Final = ("gpt_oss", "aria", "aria_text", "openai_privacy_filter")

# A stacked parameter, and the names of its matrices if experts are stored separately.
_SPLITS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w3",)),
    "down_proj": (("down_proj",), ("w2",)),
}
# The first version of PEFT that reads stacks of other families as (experts, out, in).
_OUT_IN_SINCE: Final = (0, 19, 1)
_OTHER_BASE: Final = "name the base model that the adapter was trained on"
_EXPERT: Final = re.compile(r"(?P<owner>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")


@dataclass(frozen=True)
class Place:
    """A matrix in a stored tensor: all of it, one row of a stack, or a part of either.

    `part` slices the output axis. `transposed` means that the matrix is stored (in, out); None if
    not known yet.
    """

    tensor: str
    row: int | None = None
    part: slice | None = None
    transposed: bool | None = None


_Factors = Callable[[str], "Tensor"]  # reads a tensor of the adapter


@dataclass(frozen=True)
class _Update:
    """One low-rank update of one place: rows `out` of B times A, for one expert of the pair."""

    pair: LoraPair
    place: Place
    share: slice  # of the axis that is split over several tensors: B's rows, or A's columns
    expert: int | None
    experts: int
    grouped: bool = False  # whether B's columns are grouped by expert

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
        if self.expert is not None:  # A is (experts * rank, in), B is (out, rank * experts)
            a = a.view(self.experts, -1, a.shape[1])[self.expert]
            if self.grouped:
                b = b.view(b.shape[0], self.experts, -1)[:, self.expert]
            else:
                b = b.view(b.shape[0], -1, self.experts)[:, :, self.expert]
        if self.place.transposed:
            a = a[:, self.share]
        else:
            b = b[self.share]
        return a.to(dtype), b.to(dtype)


class LoraChanges:
    """Matches all adapter tensors to a base, and reads its tensors with the adapter added.

    An adapter tensor that matches nothing in the base at `path` is refused. `infos` are the tensors
    whose shape changes with a resized vocabulary. `layout` is the user's (`ModelRef.lora_layout`).
    """

    def __init__(
        self,
        adapter: Adapter,
        path: Path,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        layout: str | None = None,
    ) -> None:
        self._adapter = adapter
        self._config = config
        self._tensors = tensors
        self._shapes = adapter.file.tensors
        self._factors = lru_cache(CACHED)(adapter.file.read)
        self._updates: dict[str, list[_Update]] = defaultdict(list)
        self._biases: dict[str, list[LoraPair]] = defaultdict(list)
        self._replaced: dict[str, str] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.notices: tuple[str, ...] = ()
        self._unmatched: set[str] = set()
        self._stacks: list[LoraPair] = []
        for parameter, name in adapter.replacements.items():
            self._replace(parameter, name)
        for pair in adapter.pairs:
            self._add(pair)
        self._add_stacks((layout or "").split(","))
        if self._unmatched:
            tied = config.get("tie_word_embeddings")
            raise CheckpointError(
                f"{len(self._unmatched)} tensors of the adapter {adapter.path} match nothing "
                f"in {path}: {first_few(sorted(self._unmatched))}",
                hint=_OTHER_BASE
                + ("; its output layer is tied to the embeddings, so it has none" if tied else ""),
            )

    def touches(self, name: str) -> bool:
        """Return whether the adapter changes a tensor of the base."""
        return name in self._updates or name in self._biases or name in self._replaced

    def read(self, name: str, rows: RowRange | None, base: Callable[[], Tensor]) -> Tensor:
        """Read a changed tensor, or rows of it; `base` reads the base's."""
        if name in self._replaced:
            block = self._adapter.file.read(self._replaced[name], rows)
            block = block.to(self._tensors[name].dtype.torch)
        else:
            block = base()
        if name not in self._updates and name not in self._biases:
            return block
        start = rows[0] if rows else 0
        work = block.to(torch.float64 if block.dtype == torch.float64 else torch.float32)
        for update in self._updates.get(name, ()):
            update.apply(work, start, self._factors)
        for pair in self._biases.get(name, ()):
            bias = self._factors(str(pair.bias))[start : start + work.shape[0]]
            work.add_(bias.to(work.dtype), alpha=pair.scaling)
        return work.to(block.dtype)

    def _places(self, parameter: str, expert: int | None, out: int) -> Sequence[Place]:
        """Return the places of a matrix (`expert` None) or of one expert in a stacked parameter.

        `out` is the number of the matrix's rows.
        """
        for name in _aliases(parameter):
            if name in self._tensors:
                return [Place(name, row=expert)]
            if expert is None:
                places = _one_expert(name, out, self._tensors)
            else:
                places = _split(name, expert, self._tensors)
            if places:
                return places
        return []

    def _replace(self, parameter: str, name: str) -> None:
        given = self._shapes[name]
        places = self._places(parameter, None, given.rows)
        if len(places) != 1 or places[0].row is not None or places[0].part is not None:
            if not self._is_tied_copy(parameter, name):
                self._unmatched.add(name)
            return
        info = self._tensors[places[0].tensor]
        if len(info.shape) != len(given.shape) or info.shape[1:] != given.shape[1:]:
            raise CheckpointError(
                f"the adapter replaces {info.name!r} of shape {list(info.shape)} by {name!r} of "
                f"shape {list(given.shape)}; only the vocabulary may change",
                hint=_OTHER_BASE,
            )
        self._replaced[info.name] = name
        self.infos[info.name] = TensorInfo.of(info.name, info.dtype, given.shape)

    def _is_tied_copy(self, parameter: str, name: str) -> bool:
        """Return whether this is an output layer saved as a copy of the tied embeddings."""
        twin = self._adapter.replacements.get("model.embed_tokens.weight")
        tied = self._config.get("tie_word_embeddings") and parameter == "lm_head.weight"
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
        if experts > 1 or self._is_stack(pair.parameter):
            self._stacks.append(pair)
        else:
            self._add_matrix(pair, self._orientations(pair))
        if pair.bias is not None:
            self._add_bias(pair)

    def _is_stack(self, parameter: str) -> bool:
        """Return whether a pair with one expert belongs to a stack of one expert."""
        places = [p for p in self._places(parameter, None, 0) if p.row is None]
        infos = [self._tensors.get(place.tensor) for place in places]
        return any(info is not None and len(info.shape) == 3 for info in infos)

    def _add_stacks(self, stated: Sequence[str]) -> None:
        """Add the pairs on stacked experts, all in one order of B and one orientation."""
        if not self._stacks:
            return
        grouped = self._grouped(stated)
        transposed = self._stacks_transposed(stated)
        for pair in self._stacks:
            if pair.magnitude is not None:
                raise _dora_error(pair)
            experts = self._shapes[pair.a].rows // pair.rank
            for expert in range(experts):
                self._add_matrix(pair, (transposed,), expert, experts, grouped=grouped)

    def _grouped(self, stated: Sequence[str]) -> bool:
        """Return whether B's columns are grouped by expert, as the user or the file states.

        PEFT's order is by rank and is not stated. Unsloth grouped them by expert until September
        2026 without a statement; it states the order since.
        """
        own = self._adapter.settings.lora_B_layout
        order = next((word for word in stated if word in LORA_LAYOUTS[0]), own)
        if order is not None:
            return order == "grouped_by_expert"
        if "unsloth_fixed" in (self._adapter.settings.auto_mapping or {}):
            raise CheckpointError(
                f"the adapter {self._adapter.path} changes stacked experts and was written by "
                "Unsloth, but has no lora_B_layout: lora_B may be in either of two orders",
                hint="write BASE+ADAPTER#grouped_by_expert (Unsloth before September 2026) or "
                "BASE+ADAPTER#rank_major (PEFT's order)",
            )
        self.notices = (
            f"the adapter {self._adapter.path} changes stacked experts without a lora_B_layout: "
            "it is read in PEFT's order. If Unsloth before September 2026 trained it, write "
            "BASE+ADAPTER#grouped_by_expert",
        )
        return False

    def _stacks_transposed(self, stated: Sequence[str]) -> bool:
        """Return whether A's columns follow the first axis of an expert's stored matrix.

        The user decides, then the shapes, then the version of PEFT.
        """
        orientation = next((word for word in stated if word in LORA_LAYOUTS[1]), None)
        if orientation is not None:
            return orientation == "in_out"
        found = [(pair, self._places(pair.parameter, 0, 0)) for pair in self._stacks]
        fits = [t for t in (False, True) if all(self._fit(*one, transposed=t) for one in found)]
        if len(fits) != 2:
            return fits == [True]
        if self._config.get("model_type") in TRANSPOSED_STACKS:
            return True
        version = _release(self._adapter.settings.peft_version)
        if version is not None:
            return version < _OUT_IN_SINCE
        raise CheckpointError(
            f"the adapter {self._adapter.path} changes stacks of square matrices, and its config "
            "has no peft_version that decides their orientation",
            hint="write BASE+ADAPTER#in_out if PEFT 0.17 to 0.19.0 trained it, and "
            "BASE+ADAPTER#out_in if a later version did",
        )

    def _add_matrix(
        self,
        pair: LoraPair,
        orientations: Sequence[bool],
        expert: int | None = None,
        experts: int = 1,
        *,
        grouped: bool = False,
    ) -> None:
        """Add a pair, or its part for one expert, in the first orientation that fits."""
        rows, columns = self._shapes[pair.b].rows, self._shapes[pair.a].shape[1]
        places = self._places(pair.parameter, expert, rows)
        if not places or any(place.tensor not in self._tensors for place in places):
            self._unmatched.update(pair.names)
            return
        if pair.magnitude is not None and (orientations[0] or places != [Place(places[0].tensor)]):
            raise _dora_error(pair)
        fitted = (self._fit(pair, places, transposed=transposed) for transposed in orientations)
        oriented = next((places for places in fitted if places), None)
        if oriented is None:
            info = self._tensors[places[0].tensor]
            raise CheckpointError(
                f"the adapter's pair for {pair.parameter!r} makes a {rows} x {columns} matrix, "
                f"which does not fit {info.name!r} of shape {list(info.shape)}",
                hint=_OTHER_BASE,
            )
        share = (columns if oriented[0].transposed else rows) // len(oriented)
        for i, place in enumerate(oriented):
            part = slice(i * share, (i + 1) * share)
            update = _Update(pair, place, part, expert, experts, grouped)
            self._updates[place.tensor].append(update)

    def _fit(self, pair: LoraPair, places: Sequence[Place], *, transposed: bool) -> list[Place]:
        """Return the places with their orientation; none if the pair's matrix does not fit them."""
        rows, columns = self._shapes[pair.b].rows, self._shapes[pair.a].shape[1]
        first, second = (columns, rows) if transposed else (rows, columns)
        first, left = divmod(first, max(1, len(places)))
        oriented = [replace(place, transposed=transposed) for place in places]
        fits = all(self._matrix_shape(place) == (first, second) for place in oriented)
        return oriented if fits and not left else []

    def _matrix_shape(self, place: Place) -> tuple[int, ...]:
        """Return the stored shape of a place's matrix."""
        info = self._tensors[place.tensor]
        if info.dtype not in FLOATS:
            raise CheckpointError(
                f"the adapter changes {info.name!r}, which is stored as {info.dtype}",
                hint="dequantise the base model first",
            )
        shape = self.infos.get(info.name, info).shape
        if place.row is not None:
            shape = shape[1:] if place.row < shape[0] else ()
        if place.part is None or len(shape) != 2:
            return shape
        axis = 1 if place.transposed else 0
        part = len(range(*place.part.indices(shape[axis])))
        return (shape[0], part) if axis else (part, shape[1])

    def _orientations(self, pair: LoraPair) -> tuple[bool, ...]:
        """Return whether a matrix may be stored transposed, the likelier case first."""
        if pair.embedding:  # A is (rank, vocabulary), B is (width, rank)
            return (True,)
        if all(place.row is None for place in self._places(pair.parameter, None, 1)):
            return (self._adapter.settings.fan_in_fan_out,)
        transposed = self._config.get("model_type") in TRANSPOSED_STACKS
        return (transposed, not transposed)

    def _add_bias(self, pair: LoraPair) -> None:
        name = pair.parameter.removesuffix(".weight") + ".bias"
        places = self._places(name, None, self._shapes[str(pair.bias)].rows)
        if len(places) != 1 or places[0].row is not None:
            self._unmatched.add(str(pair.bias))
            return
        self._biases[places[0].tensor].append(pair)


def _dora_error(pair: LoraPair) -> CheckpointError:
    return CheckpointError(
        f"the adapter uses DoRA on {pair.parameter!r}, an embedding, a transposed matrix or a part "
        "of a stack, where it is not supported",
        hint="merge the adapter with peft (merge_and_unload) and use the result",
    )


def _release(version: str | None) -> tuple[int, ...] | None:
    """Return the numbers of a version; None if unknown or a preview of `_OUT_IN_SINCE`."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})(.*)", version or "")
    if match is None:
        return None
    numbers = tuple(map(int, match.groups()[:3]))
    return None if numbers == _OUT_IN_SINCE and match[4] else numbers


# --- parameters of the loaded model on disk -------------------------------------------------------
# An adapter names parameters of the loaded model (`mlp.experts.gate_up_proj`, a stack). A
# checkpoint may store them one expert at a time, or vice versa.


def _aliases(parameter: str) -> list[str]:
    """Return the names of a parameter in checkpoints of the same model."""
    names = [parameter, parameter.removeprefix("model."), f"model.{parameter}"]
    names += [name.replace(".mlp.", ".block_sparse_moe.") for name in names]
    return list(dict.fromkeys(names))


def _split(name: str, expert: int, tensors: Mapping[str, TensorInfo]) -> Sequence[Place]:
    """Find an expert of a stacked parameter in tensors per expert and projection."""
    owner, _, stack = name.rpartition(".")
    for matrices in _SPLITS.get(stack, ()):
        names = [f"{owner}.{expert}.{matrix}.weight" for matrix in matrices]
        if all(n in tensors for n in names):
            return [Place(n) for n in names]
    return []


def _one_expert(name: str, out_features: int, tensors: Mapping[str, TensorInfo]) -> Sequence[Place]:
    """Find one expert's matrix in a stored stack."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return []
    expert = int(match["expert"])
    for stack, splits in _SPLITS.items():
        info = tensors.get(f"{match['owner']}.{stack}")
        for matrices in splits:
            if info is None or match["matrix"] not in matrices or len(info.shape) != 3:
                continue
            if expert >= info.shape[0]:
                return []
            start = matrices.index(match["matrix"]) * out_features
            part = None if len(matrices) == 1 else slice(start, start + out_features)
            return [Place(info.name, expert, part)]
    return []
