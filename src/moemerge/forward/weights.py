"""Load parts of a model from a checkpoint, place them on the device, and free them."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moemerge.checkpoint.quantised.tensor import FetchStored, QuantisedInfo
from moemerge.checkpoint.reader import Checkpoint
from moemerge.checkpoint.tensors import format_size
from moemerge.errors import CheckpointError, NumericalError, UsageError
from moemerge.forward.loading import NameMap, Recipe, keeps_float32, map_names, tied_names
from moemerge.runtime.gpu import BUFFER_BYTES, Uploads, uploads_to
from moemerge.runtime.timing import Stopwatch

logger = logging.getLogger(__name__)

SUMMED_AT_ONCE = 2**22  # values
# Parallel reads within one layer. If the CPU computes, more readers only wait for each other. A
# GPU's host has spare cores, and reads from the page cache are as fast as the cores copy.
READERS = 4
UPLOAD_READERS = 8
UPLOAD_BUFFERS = 2 * UPLOAD_READERS  # one is filled while another is sent
PINNED_BYTES = UPLOAD_BUFFERS * BUFFER_BYTES


@dataclass(frozen=True)
class Fetch:
    """Parameters being read: allocated and filled by `pieces`; `others` need a conversion."""

    tensors: dict[str, Tensor]  # by name in memory, on the device
    pieces: tuple[StoredSlice, ...]
    others: tuple[Recipe, ...]
    tied: dict[str, str]  # a second name of a parameter -> the first


@dataclass(frozen=True)
class StoredSlice:
    """A stored tensor, or rows of it, and the part of a parameter that it fills."""

    name: str  # on disk
    rows: tuple[int, int] | None
    slot: Tensor


class Weights:
    """Reads a meta model's parameters and persistent buffers from a checkpoint on demand.

    `prefetch` and `fetch` read; `place` and `free` change the model. Only reading happens in other
    threads than the computing one. For a GPU, tensors pass through a few pinned buffers into their
    parameters while the device computes; quantised ones are decoded there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        stopwatch: Stopwatch | None = None,
        as_stored: Collection[str] = (),  # parameters that keep the dtype that they have on disk
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.device = device
        self.names: NameMap = map_names(model, checkpoint)
        self._state: Mapping[str, Tensor] = dict(model.state_dict())
        self._meta = {name: p for name, p in model.named_parameters(remove_duplicate=False)}
        self._float32 = keeps_float32(model, dtype)
        self._as_stored = as_stored
        self._tied = tied_names(model)
        self._stopwatch = stopwatch or Stopwatch(device)
        readers = READERS if device.type == "cpu" else UPLOAD_READERS
        self._uploads = uploads_to(device, UPLOAD_BUFFERS)
        self._ahead: tuple[str, Future[dict[str, Tensor]]] | None = None
        with ExitStack() as undo:  # end started threads if a later line fails
            self._pool = ThreadPoolExecutor(readers, "moemerge-read")
            undo.callback(self._pool.shutdown)
            self._background = ThreadPoolExecutor(1, "moemerge-prefetch")
            undo.callback(self._background.shutdown)
            self._buffers_to_device()
            undo.pop_all()

    def close(self) -> None:
        """Stop prefetching; placed parameters stay."""
        self._ahead = None
        # The readers first: otherwise a started part would be read to its end.
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._background.shutdown(wait=True, cancel_futures=True)
        if self._uploads is not None:
            # Copies that were sent may still write to memory that is freed now.
            with suppress(RuntimeError):  # a failed GPU, whose error was raised already
                self._uploads.finish()

    def names_under(self, prefix: str) -> tuple[str, ...]:
        """Return the names in memory of all tensors below a module path."""
        return tuple(name for name in self._state if name.startswith(prefix + "."))

    def nbytes(self, prefix: str) -> int:
        """Return the size in memory of the parameters below a module path."""
        return self.nbytes_of(self.names_under(prefix))

    def nbytes_of(self, names: Iterable[str]) -> int:
        return sum(self._state[name].numel() * self._dtype_of(name).itemsize for name in names)

    # --- reading ---

    def fetch(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors by name in memory, converted and in their final dtype."""
        return self._read(self._part(names))

    def prefetch(self, key: str, names: Iterable[str]) -> None:
        """Start to read in the background; at most one such part is held."""
        if self._ahead is None:
            self._ahead = (key, self._background.submit(self._read, self._part(names)))

    def fetched(self, key: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the part that was prefetched under this key, or read it now."""
        ahead, self._ahead = self._ahead, None
        tensors = None if ahead is None else ahead[1].result()
        was_ahead = ahead is not None and ahead[0] == key
        where = "prefetched" if was_ahead else "read now"
        logger.debug("%s of %s: %s", key, self.checkpoint.label, where)
        return tensors if tensors is not None and was_ahead else self.fetch(names)

    def advise(self, names: Iterable[str]) -> None:
        """Let the system start to read the part after the next one."""
        self._background.submit(self._advise, tuple(names))

    def _advise(self, names: Iterable[str]) -> None:
        for name in names:
            recipe = self._recipe(name)
            for _, stored in () if recipe is None else recipe.sources:
                self.checkpoint.prefetch(stored)

    def _recipe(self, name: str) -> Recipe | None:
        recipe = self.names.recipes.get(name)
        if recipe is None and name in self._tied:
            recipe = self.names.recipes.get(self._tied[name])
        return recipe

    def _part(self, names: Iterable[str]) -> Fetch:
        """Allocate the parameters that are read into place, and list the reads."""
        tensors: dict[str, Tensor] = {}
        pieces: list[StoredSlice] = []
        others: dict[str, Recipe] = {}
        tied: dict[str, str] = {}
        for name in names:
            recipe = self._recipe(name)
            if recipe is None:
                continue  # `check` reports it, unless a splitting conversion makes it
            target = recipe.target
            columns = recipe.columns
            if columns is None:
                others[target] = recipe
            elif target not in tensors:
                shape = self._shape_on_disk(target, columns, stacked=recipe.converter is not None)
                tensors[target] = torch.empty(
                    shape, dtype=self._dtype_of(target), device=self.device
                )
                pieces += self._pieces(tensors[target], columns, recipe.converter is not None)
            if target != name:
                tied[name] = target
        if self._uploads is not None:
            self._uploads.begin()
        return Fetch(tensors, tuple(pieces), tuple(others.values()), tied)

    def _shape_on_disk(
        self, target: str, columns: tuple[tuple[str, ...], ...], *, stacked: bool
    ) -> tuple[int, ...]:
        infos = [self.checkpoint.tensors[names[0]] for names in columns]
        shape = infos[0].shape
        if stacked:
            shape = (len(columns[0]), sum(info.shape[0] for info in infos), *shape[1:])
        if shape != tuple(self._state[target].shape):
            also = " and its kin" if stacked else ""
            raise self._mismatch(target, shape, columns[0][0] + also)
        return shape

    def _pieces(
        self, out: Tensor, columns: tuple[tuple[str, ...], ...], stacked: bool
    ) -> Iterator[StoredSlice]:
        """List the reads of a parameter; experts are read into the stack, without another copy."""
        if not stacked:
            yield from self._in_rows(columns[0][0], out)
            return
        start = 0
        for names in columns:
            stop = start + self.checkpoint.tensors[names[0]].shape[0]
            for expert, name in enumerate(names):
                slot = out[expert, start:stop]
                shape = self.checkpoint.tensors[name].shape
                if shape != tuple(slot.shape):
                    raise self._mismatch(name, shape, name, tuple(slot.shape))
                yield from self._in_rows(name, slot)
            start = stop

    def _in_rows(self, name: str, slot: Tensor) -> Iterator[StoredSlice]:
        """Split a read into pieces of a buffer's size, which are read in parallel.

        Without pieces, a conversion on a CPU would hold both copies of a whole tensor.
        """
        nbytes = slot.numel() * slot.element_size()
        if nbytes <= BUFFER_BYTES:
            yield StoredSlice(name, None, slot)
            return
        rows = slot.shape[0]
        step = max(1, rows * BUFFER_BYTES // nbytes)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield StoredSlice(name, (start, stop), slot[start:stop])

    def _read(self, part: Fetch) -> dict[str, Tensor]:
        begin = time.perf_counter()
        jobs = [self._pool.submit(self._fill, piece) for piece in part.pieces]
        made = dict(part.tensors)
        for recipe in part.others:
            made.update(self._convert(recipe))
        for job in jobs:
            job.result()
        made.update({name: made[target] for name, target in part.tied.items()})
        size = sum(tensor.numel() * tensor.element_size() for tensor in made.values())
        seconds = time.perf_counter() - begin
        self._stopwatch.aside("read", seconds)
        label, count = self.checkpoint.label, len(made)
        logger.debug("read %d tensors of %s, %s, %.3f s", count, label, format_size(size), seconds)
        return made

    def _fill(self, piece: StoredSlice) -> None:
        info, uploads = self.checkpoint.tensors[piece.name], self._uploads
        if uploads is None:
            self._read_into(piece, piece.slot)
        elif isinstance(info, QuantisedInfo) and info.dtype.torch == piece.slot.dtype:
            with uploads.queued():  # its codes are sent, and decoded on the device
                fetch = partial(self._send_codes, uploads, piece.slot.device)
                self._read_stored(piece.name, piece.rows, piece.slot, fetch)
        else:
            with uploads.buffer() as pinned:
                host = pinned.like(piece.slot)
                self._read_into(piece, host)
                pinned.send(host, piece.slot)

    def _send_codes(
        self, uploads: Uploads, device: torch.device, part: str, rows: tuple[int, int] | None
    ) -> Tensor:
        """Read a part of a quantised tensor, as it is stored, to the device."""
        info = self.checkpoint.stored_info(part)
        assert info is not None
        there = torch.empty(info.block_shape(rows), dtype=info.dtype.torch, device=device)
        with uploads.buffer() as pinned:
            host = pinned.like(there)
            self.checkpoint.stored(part, rows, host)
            pinned.send(host, there)
        return there

    def _read_into(self, piece: StoredSlice, out: Tensor) -> None:
        if self.checkpoint.tensors[piece.name].dtype.torch == out.dtype:
            self._read_stored(piece.name, piece.rows, out)
        else:
            out.copy_(self._read_stored(piece.name, piece.rows))

    def _read_stored(
        self,
        name: str,
        rows: tuple[int, int] | None = None,
        out: Tensor | None = None,
        codes: FetchStored | None = None,
    ) -> Tensor:
        """Read a tensor or rows of it, and count the bytes on disk."""
        info = self.checkpoint.tensors[name]
        count = info.rows if rows is None else rows[1] - rows[0]
        self._stopwatch.aside("read", 0.0, info.stored_bytes * count // max(1, info.rows))
        return self.checkpoint.read(name, rows, out, codes)

    def _convert(self, recipe: Recipe) -> dict[str, Tensor]:
        dtype = self._dtype_of(recipe.target)
        made = recipe.convert(self.model, lambda name: self._read_stored(name).to(dtype))
        if self._uploads is None:
            return made
        return {name: value.contiguous().pin_memory() for name, value in made.items()}

    def _dtype_of(self, name: str) -> torch.dtype:
        recipe = self._recipe(name) if name in self._as_stored else None
        if recipe is not None:
            stored = {self.checkpoint.tensors[source].dtype.torch for _, source in recipe.sources}
            if len(stored) == 1:
                return stored.pop()
        return torch.float32 if self._float32(name) else self._state[name].dtype

    # --- placing ---

    def place(self, tensors: Mapping[str, Tensor]) -> None:
        """Put fetched tensors into the model, on its device."""
        if self._uploads is not None:
            self._uploads.finish()
        moved: dict[int, nn.Parameter] = {}  # tied names share one parameter, as in the whole model
        for name, tensor in tensors.items():
            wanted = self._state.get(name)
            if wanted is None:
                raise CheckpointError(f"{self.checkpoint.label}: no place for {name} in the model")
            if wanted.shape != tensor.shape:
                raise self._mismatch(name, tuple(tensor.shape), self._stored(name))
            if id(tensor) not in moved:
                there = tensor.to(self.device, non_blocking=True)
                moved[id(tensor)] = nn.Parameter(there, requires_grad=False)
            _set(self.model, name, moved[id(tensor)])

    def put(self, name: str, value: Tensor) -> None:
        """Use this value from now on, rounded to the stored dtype.

        A value that already has this dtype is used unchanged. Any other must be finite after
        rounding.
        """
        parameter = _current(self.model, name)
        if value.numel() != parameter.numel() or value.shape[-1:] != parameter.shape[-1:]:
            raise UsageError(
                f"{name}: got shape {list(value.shape)}, expected {list(parameter.shape)}"
            )
        stored = self.checkpoint.tensors[self._stored(name)].dtype.torch
        if value.dtype != stored:
            value = value.detach().to(stored)
            if not bool(torch.isfinite(value).all()):
                raise NumericalError(f"{name}: the new weights are not finite in {stored}")
        with torch.no_grad():
            parameter.copy_(value.reshape(parameter.shape))

    def free(self, names: Iterable[str]) -> None:
        """Move parameters back to meta; buffers (small, and partly not on disk) stay."""
        for name in names:
            if name in self._meta:
                parent, leaf = _parent(self.model, name)
                setattr(parent, leaf, self._meta[name])

    def check(self, names: Iterable[str], where: str) -> None:
        """Raise an error if one of these tensors is still on meta."""
        left = [name for name in names if _current(self.model, name).device.type == "meta"]
        if left:
            shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise CheckpointError(
                f"{self.checkpoint.label}: no stored tensor for {shown} (in {where})",
                hint="weights that config.json requires are missing, or have other names",
            )

    def require_finite(self, names: Iterable[str]) -> None:
        """Refuse NaN and infinity in these parameters, if they are in memory."""
        values = {name: _current(self.model, name) for name in names}
        there = {n: v for n, v in values.items() if v.is_floating_point() and not v.is_meta}
        if not there:
            return
        # A finite sum has only finite terms; this synchronises once.
        sums = torch.stack([_sum(value) for value in there.values()])
        if bool(sums.isfinite().all()):
            return
        bad = [name for name, value in there.items() if not _is_finite(value)]
        if bad:
            raise self._not_finite(bad)

    def require_finite_on_disk(self, names: Iterable[str]) -> None:
        """Refuse NaN and infinity in parameters of modules that do not run: final norm, head."""
        for name in names:
            for _, stored in self.names.recipes[name].sources:
                value = self._read_stored(stored)
                if value.is_floating_point() and not _is_finite(value):
                    raise self._not_finite([name])

    def _not_finite(self, names: Sequence[str]) -> NumericalError:
        """Return an error that names the non-finite tensors on disk and their file."""
        recipes = [recipe for recipe in map(self._recipe, names) if recipe is not None]
        stored = [name for recipe in recipes for _, name in recipe.sources]
        damaged = [n for n in stored if not _is_finite(self.checkpoint.read(n))]
        if not damaged:
            return NumericalError(
                f"{self.checkpoint.label}: {', '.join(names)} overflows in this dtype",
                hint='the stored values are finite: try `dtype="float32"`',
            )
        place = self.checkpoint.place_of(damaged[0])
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        return NumericalError(
            f"{self.checkpoint.label}: {damaged[0]} holds NaN or infinity, in {place}{more}",
            hint="repair that model: the checkpoint is damaged",
        )

    def _stored(self, name: str) -> str:
        recipe = self._recipe(name)
        return name if recipe is None else recipe.sources[0][1]

    def _mismatch(
        self,
        name: str,
        got: tuple[int, ...],
        stored: str,
        wanted: tuple[int, ...] | None = None,
    ) -> CheckpointError:
        wanted = tuple(self._state[name].shape) if wanted is None else wanted
        return CheckpointError(
            f"{self.checkpoint.label}: {name} has shape {list(got)} (stored as {stored}), but its "
            f"config.json requires {list(wanted)}",
            hint="weights and config.json do not belong together, or an expert is missing",
        )

    def _buffers_to_device(self) -> None:
        for module in self.model.modules():
            buffers = module.named_buffers(recurse=False, remove_duplicate=False)
            for leaf, buffer in list(buffers):
                setattr(module, leaf, buffer.to(self.device))


def _parent(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _current(model: nn.Module, name: str) -> Tensor:
    parent, leaf = _parent(model, name)
    value: Any = getattr(parent, leaf)
    assert isinstance(value, Tensor)
    return value


def _set(model: nn.Module, name: str, value: nn.Parameter) -> None:
    parent, leaf = _parent(model, name)
    is_buffer = any(name == leaf for name, _ in parent.named_buffers(recurse=False))
    setattr(parent, leaf, value.data if is_buffer else value)


def _is_finite(value: Tensor) -> bool:
    """Return whether all values are finite; a finite sum has only finite terms."""
    return bool(_sum(value).isfinite()) or bool(value.isfinite().all())


def _sum(value: Tensor) -> Tensor:
    """Return the sum in float32, on a CPU without a float32 copy of the whole tensor."""
    if value.device.type != "cpu" or value.dtype == torch.float32:
        return value.sum(dtype=torch.float32)
    parts = torch.split(value.reshape(-1), SUMMED_AT_ONCE)
    # One buffer for all parts: several would fragment the heap.
    wide = torch.empty(parts[0].shape, dtype=torch.float32)
    total = torch.zeros((), dtype=torch.float32)
    for part in parts:
        total += wide[: part.numel()].copy_(part).sum()
    return total
