"""Merge blocks of elementwise methods chunk by chunk: read, merge, round, check.

A chunk of each model, its float32 copy and the result fit into a core's cache. Each step then works
in cache instead of going to memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.tensors import as_bytes
from moemerge.errors import NumericalError
from moemerge.merging.method import UnitInfo
from moemerge.merging.plan import MergeBlock, MergePlan, UnitInput, UnitMerge
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.lazy import torch
from moemerge.runtime.progress import counted, first_few

if TYPE_CHECKING:
    from torch import Tensor

TENSORS_NAMED = 3  # in one notice


def is_finite(tensor: Tensor) -> bool:
    """Return whether there is no NaN or infinity. Also False if the sum overflows."""
    # One pass at memory speed: a finite sum has only finite terms.
    return math.isfinite(tensor.sum().item())


class FiniteCheck:
    """Checks that everything a merge reads and writes is finite. Thread-safe."""

    def __init__(self, plan: MergePlan, *, allow: bool) -> None:
        self._plan = plan
        self._allow = allow
        self._noted: dict[str, dict[str, None]] = {}  # model -> tensors that are not finite
        self._lock = threading.Lock()

    def read(self, tensor: Tensor, source: UnitInput) -> None:
        """Refuse or record an input tensor (or a part of it) that is not finite."""
        if not tensor.is_floating_point() or is_finite(tensor):
            return
        bad = int((~tensor.isfinite()).sum())
        if not bad:
            return
        model = self._plan.models[source.model]
        if not self._allow:
            raise NumericalError(
                f"{model.label}: tensor {source.tensor} holds {bad} non-finite values "
                f"(NaN or infinity) among {tensor.numel()}",
                hint="repair that model, or merge anyway with `allow_nonfinite=True`",
            )
        self._note(model.label, source.tensor)

    def is_noted(self, source: UnitInput) -> bool:
        return source.tensor in self._noted.get(self._plan.models[source.model].label, ())

    def merged(self, result: Tensor, block: MergeBlock) -> None:
        """Refuse or record a result that overflowed its dtype."""
        if not result.is_floating_point() or is_finite(result) or bool(result.isfinite().all()):
            return
        if not self._allow:
            raise NumericalError(
                f"the merged tensor {block.tensor} holds values that {result.dtype} cannot",
                hint="choose a wider dtype or out_dtype (bfloat16, float32), or smaller weights",
            )
        self._note("the merged model", block.tensor)

    def _note(self, whose: str, tensor: str) -> None:
        with self._lock:
            self._noted.setdefault(whose, {})[tensor] = None

    @property
    def noted(self) -> dict[str, list[str]]:
        """Return the tensors that are not finite, by model."""
        return {whose: list(tensors) for whose, tensors in self._noted.items()}

    def note(self, noted: Mapping[str, Sequence[str]]) -> None:
        """Add the findings of another process."""
        for whose, tensors in noted.items():
            for tensor in tensors:
                self._note(whose, tensor)

    def notices(self) -> Iterator[str]:
        """Yield one notice per model for the tensors that `allow_nonfinite` accepted."""
        for whose, tensors in sorted(self._noted.items()):
            count = counted(len(tensors), "tensor holds", "tensors hold")
            yield f"{whose}: {count} NaN or infinity ({first_few(sorted(tensors), TENSORS_NAMED)})"


# Elements read at once. An accelerator needs one long launch instead of a fit to the cache.
CPU_READ_ELEMENTS = 2**17
DEVICE_READ_ELEMENTS = 2**26
# Dtypes that sums widen to float32.
_NARROW = frozenset({Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16})

Apply = Callable[[UnitMerge, UnitInfo, Sequence["Tensor"]], "Tensor"]


@dataclass(frozen=True)
class _InputRun:
    """The contiguous elements of a block in one model's file."""

    source: UnitInput
    checkpoint: Checkpoint
    dtype: torch.dtype
    start: int

    @classmethod
    def of(cls, source: UnitInput, plan: MergePlan) -> _InputRun:
        checkpoint = plan.models[source.model].checkpoint
        info = checkpoint.tensors[source.tensor]
        row = 0 if source.slot.rows is None else source.slot.rows[0]
        start = row * (info.row_bytes // info.dtype.itemsize)
        return cls(source, checkpoint, info.dtype.torch, start)

    def fill(self, buffer: _Buffer, start: int) -> None:
        self.checkpoint.read_elements(self.source.tensor, self.start + start, buffer.view)


@dataclass(frozen=True)
class _Buffer:
    tensor: Tensor
    view: memoryview


class _Scratch(threading.local):
    """A thread's buffers, reused for every chunk of the same length."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, torch.dtype], _Buffer] = {}
        self._length = 0

    def buffer(self, name: object, length: int, dtype: torch.dtype) -> _Buffer:
        if length != self._length:
            self._buffers.clear()
            self._length = length
        buffer = self._buffers.get((name, dtype))
        if buffer is None:
            tensor = torch.empty(length, dtype=dtype)
            buffer = self._buffers[name, dtype] = _Buffer(tensor, as_bytes(tensor))
        return buffer


class ChunkMerger:
    """Merges blocks that can be split into chunks."""

    def __init__(
        self, plan: MergePlan, device: torch.device, apply: Apply, finite: FiniteCheck
    ) -> None:
        self._plan = plan
        self._input_dtype = None if plan.input_dtype is None else plan.input_dtype.torch
        self._apply = apply
        self._finite = finite
        self._cpu = device.type == "cpu"
        self._length = CPU_READ_ELEMENTS if self._cpu else DEVICE_READ_ELEMENTS
        self._scratch = _Scratch()

    def takes(self, block: MergeBlock) -> bool:
        """Return whether a block is one elementwise unit, stored alike in all models and OUT."""
        if len(block.merges) != 1:
            return False
        (merge,) = block.merges
        if not merge.elementwise or merge.prepare is not None:
            return False
        slots = (merge.unit.slot, *(source.slot for source in merge.reads))
        return all(slot.covers_block for slot in slots) and all(
            self._plan.models[s.model].checkpoint.has_elements(s.tensor) for s in merge.reads
        )

    def merge(self, block: MergeBlock, unit: UnitInfo, dtype: torch.dtype) -> Tensor:
        """Return the merged block in the output's dtype."""
        (merge,) = block.merges
        result = torch.empty(block.shape, dtype=dtype)
        runs = [_InputRun.of(source, self._plan) for source in merge.reads]
        weigh = merge.method.weights
        dtypes = {Dtype.of(self._input_dtype or run.dtype) for run in runs}
        if weigh is not None and self._cpu and dtypes <= _NARROW:
            weights = weigh([source.params for source in merge.inputs], merge.options, unit)
            for start, chunk in self._chunks(result):
                self._sum(runs, weights, start, chunk)
            return result
        for start, chunk in self._chunks(result):
            stored = [self._read(run, i, start, len(chunk)) for i, run in enumerate(runs)]
            chunk.copy_(self._apply(merge, unit, stored))
        return result

    def _chunks(self, result: Tensor) -> Iterator[tuple[int, Tensor]]:
        flat = result.view(-1)
        for start, stop in pairwise([*range(0, len(flat), self._length), len(flat)]):
            yield start, flat[start:stop]

    def _read(self, run: _InputRun, i: int, start: int, length: int) -> Tensor:
        buffer = self._scratch.buffer(i, length, run.dtype)
        run.fill(buffer, start)
        if not is_finite(buffer.tensor):
            self._check_whole([run])
        return buffer.tensor

    def _sum(
        self, runs: Sequence[_InputRun], weights: Sequence[float], start: int, out: Tensor
    ) -> None:
        """Compute Σ w_i x_i like `weighted_sum`, with one model's chunk in memory at a time."""
        length = len(out)
        total = self._scratch.buffer("total", length, torch.float32).tensor
        wide = self._scratch.buffer("wide", length, torch.float32).tensor
        for i, (run, weight) in enumerate(zip(runs, weights, strict=True)):
            stored = self._scratch.buffer("stored", length, run.dtype)
            run.fill(stored, start)
            narrow = stored.tensor
            if self._input_dtype is not None:
                narrow = narrow.to(self._input_dtype)
            wide.copy_(narrow)
            if i == 0:
                torch.mul(wide, weight, out=total)
            else:
                total.add_(wide, alpha=weight)
        # A non-finite term makes the sum non-finite, whatever its weight.
        if not is_finite(total):
            self._check_whole(runs)
        out.copy_(total)

    def _check_whole(self, runs: Sequence[_InputRun]) -> None:
        """Find the model, if any, whose part of the block holds NaN or infinity."""
        for run in runs:
            if not self._finite.is_noted(run.source):
                stored = run.checkpoint.read(run.source.tensor, run.source.slot.rows)
                self._finite.read(stored, run.source)
