"""Blocks of elementwise methods, read, merged and rounded piece by piece.

A piece is small enough that a core holds all of it in its own cache: what is read of each model,
its float32 copy and the result go to memory once instead of once for every step.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.tensors import as_bytes
from moemerge.errors import NumericalError
from moemerge.merging.method import UnitInfo
from moemerge.merging.plan import Block, MergePlan, Source, UnitMerge

# Elements of a piece: an accelerator wants one long launch instead.
CPU_PIECE = 2**17
DEVICE_PIECE = 2**26
# Dtypes that are widened to float32, as the sum is taken in.
_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})

Apply = Callable[[UnitMerge, UnitInfo, Sequence[Tensor]], Tensor]


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no NaN or infinity; False also where huge values overflow their sum."""
    # One pass at memory speed: a finite sum has only finite terms.
    return math.isfinite(tensor.sum().item())


def require_finite(tensor: Tensor, source: Source, plan: MergePlan) -> None:
    """Refuse NaN and infinity, with the tensor's name."""
    if is_finite(tensor):
        return
    bad = int((~tensor.isfinite()).sum())
    if bad:
        model = plan.models[source.model]
        raise NumericalError(
            f"{model.checkpoint.label}: tensor {source.tensor} holds {bad} non-finite values "
            f"(NaN or infinity) among {tensor.numel()}",
            hint="repair that model, or merge anyway with --allow-nonfinite",
        )


@dataclass(frozen=True)
class _Place:
    """Where the elements of a block begin in one model."""

    source: Source
    checkpoint: Checkpoint
    dtype: torch.dtype
    start: int

    @classmethod
    def of(cls, source: Source, plan: MergePlan) -> _Place:
        checkpoint = plan.models[source.model].checkpoint
        info = checkpoint.tensors[source.tensor]
        row = 0 if source.slot.rows is None else source.slot.rows[0]
        return cls(source, checkpoint, info.dtype, row * (info.row_bytes // info.dtype.itemsize))

    def fill(self, buffer: _Buffer, start: int) -> None:
        self.checkpoint.read_elements(self.source.tensor, self.start + start, buffer.view)


@dataclass(frozen=True)
class _Buffer:
    tensor: Tensor
    view: memoryview


class _Scratch(threading.local):
    """A thread's own memory, used again for every piece of the same length."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, torch.dtype], _Buffer] = {}
        self._length = 0

    def buffer(self, name: object, length: int, dtype: torch.dtype) -> _Buffer:
        if length != self._length:
            self._buffers.clear()
            self._length = length
        found = self._buffers.get((name, dtype))
        if found is None:
            tensor = torch.empty(length, dtype=dtype)
            found = self._buffers[name, dtype] = _Buffer(tensor, as_bytes(tensor))
        return found


class PieceMerger:
    """Merges the blocks that can be taken apart."""

    def __init__(
        self, plan: MergePlan, device: torch.device, apply: Apply, *, allow_nonfinite: bool
    ) -> None:
        self._plan = plan
        self._apply = apply
        self._cpu = device.type == "cpu"
        self._length = CPU_PIECE if self._cpu else DEVICE_PIECE
        self._allow_nonfinite = allow_nonfinite
        self._scratch = _Scratch()

    def takes(self, block: Block) -> bool:
        """Whether a block is one elementwise unit that lies in every model as in the output."""
        if len(block.merges) != 1:
            return False
        (merge,) = block.merges
        if not merge.method.elementwise or merge.prepare is not None:
            return False
        slots = (merge.unit.slot, *(source.slot for source in merge.sources))
        return all(slot.covers_block for slot in slots) and all(
            self._plan.models[s.model].checkpoint.has_elements(s.tensor) for s in merge.sources
        )

    def merge(self, block: Block, unit: UnitInfo, dtype: torch.dtype) -> Tensor:
        """The merged block in the output's dtype."""
        (merge,) = block.merges
        result = torch.empty(block.shape, dtype=dtype)
        places = [_Place.of(source, self._plan) for source in merge.sources]
        weigh = merge.method.weights
        dtypes = {self._plan.input_dtype or place.dtype for place in places}
        if weigh is not None and self._cpu and dtypes <= _NARROW:
            weights = weigh([source.params for source in merge.inputs], merge.options, unit)
            for start, piece in self._pieces(result):
                self._sum(places, weights, start, piece)
            return result
        for start, piece in self._pieces(result):
            stored = [self._read(p, i, start, len(piece)) for i, p in enumerate(places)]
            piece.copy_(self._apply(merge, unit, stored))
        return result

    def _pieces(self, result: Tensor) -> Iterator[tuple[int, Tensor]]:
        flat = result.view(-1)
        for start, stop in pairwise([*range(0, len(flat), self._length), len(flat)]):
            yield start, flat[start:stop]

    def _read(self, place: _Place, i: int, start: int, length: int) -> Tensor:
        buffer = self._scratch.buffer(i, length, place.dtype)
        place.fill(buffer, start)
        if not self._allow_nonfinite and not is_finite(buffer.tensor):
            self._blame([place])
        return buffer.tensor

    def _sum(
        self, places: Sequence[_Place], weights: Sequence[float], start: int, out: Tensor
    ) -> None:
        """Σ w_i x_i as `weighted_sum` takes it, with one model's piece in memory at a time."""
        length = len(out)
        total = self._scratch.buffer("total", length, torch.float32).tensor
        wide = self._scratch.buffer("wide", length, torch.float32).tensor
        for i, (place, weight) in enumerate(zip(places, weights, strict=True)):
            stored = self._scratch.buffer("stored", length, place.dtype)
            place.fill(stored, start)
            narrow = stored.tensor
            if self._plan.input_dtype is not None:
                narrow = narrow.to(self._plan.input_dtype)
            wide.copy_(narrow)
            if i == 0:
                torch.mul(wide, weight, out=total)
            else:
                total.add_(wide, alpha=weight)
        # A term that is not finite makes the sum so, whatever its weight.
        if not self._allow_nonfinite and not is_finite(total):
            self._blame(places)
        out.copy_(total)

    def _blame(self, places: Sequence[_Place]) -> None:
        """Name the model, if any, whose part of the block holds NaN or infinity."""
        for place in places:
            stored = place.checkpoint.read(place.source.tensor, place.source.slot.rows)
            require_finite(stored, place.source, self._plan)
