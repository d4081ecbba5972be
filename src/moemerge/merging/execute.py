"""Run a merge plan: read, compute and write many blocks at once, within a fixed memory budget.

Each worker processes whole blocks (read -> method -> write) and prefetches later ones, so reading,
computing and writing overlap. Every block has a fixed position in the output. The result therefore
does not depend on the order or on the number of workers.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moemerge.checkpoint.requantise import QuantisingWriter
from moemerge.checkpoint.tensors import RowRange
from moemerge.errors import CheckpointError, NumericalError, ResourceError
from moemerge.merging.coefficients import neuron_shares
from moemerge.merging.kept import ModelKeeper
from moemerge.merging.plan import (
    LargeUnit,
    MergeBlock,
    MergePlan,
    NeuronScale,
    UnitMerge,
    in_rows,
)
from moemerge.merging.report import Findings
from moemerge.merging.statistics import read_statistics
from moemerge.methods._tensors import rows_and_columns
from moemerge.methods.method import Blocks, StoppedError, UnitInfo
from moemerge.methods.wrappers import Inner
from moemerge.runtime.devices import OwnStream, cpu_count, is_out_of_memory, prepare_for_threads
from moemerge.runtime.lazy import torch
from moemerge.runtime.process import reuse_freed_memory
from moemerge.runtime.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor


# The least by default: several expert matrices. One larger block may always run alone.
DEFAULT_MEMORY_BUDGET = 768 * 2**20
# With more threads, contention for the interpreter lock dominates; workers then use several cores.
MOST_WORKERS = 8
FEWEST_WORKERS = 2  # one may wait for the disk
READ_AHEAD = 2  # prefetched blocks per worker
POLL_SECONDS = 0.5


class MemoryBudget:
    """Limits the bytes in use at once. Work larger than the whole budget runs alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + amount <= self._limit)
            self._used += amount
        try:
            yield
        finally:
            with self._changed:
                self._used -= amount
                self._changed.notify_all()


def execute(
    plan: MergePlan,
    writer: QuantisingWriter,
    progress: Progress,
    *,
    device: torch.device,
    memory_budget: int = DEFAULT_MEMORY_BUDGET,
    workers: int | None = None,
    allow_nonfinite: bool = False,
    keeper: ModelKeeper | None = None,
) -> Findings:
    """Compute and write every block of `plan`. Raises the first error; the caller aborts.

    Neither device nor memory nor workers change the result (but for a GPU's rounding).
    """
    reuse_freed_memory()
    prepare_for_threads(device)
    runner = _Runner(plan, writer, progress, device, memory_budget, allow_nonfinite, keeper)
    workers = workers or min(max(cpu_count(), FEWEST_WORKERS), MOST_WORKERS)
    progress.start("merging", sum(t.nbytes for t in plan.tensors), unit="B")
    # In the output's order, so that its parts are soon complete; but very large blocks first, so
    # that the last worker is not left with an embedding.
    usual = statistics.median_high(block.working_bytes for block in plan.blocks)
    order = sorted(plan.blocks, key=lambda block: block.working_bytes <= 4 * usual)
    later = [*order[READ_AHEAD * workers :], *[None] * (READ_AHEAD * workers)]
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, cpu_count() // workers))
    try:
        with ThreadPoolExecutor(workers, "moemerge-merge") as pool:
            try:  # Ctrl-C may also arrive while blocks are being submitted
                _wait([pool.submit(runner.run, *pair) for pair in zip(order, later, strict=False)])
            except BaseException:
                runner.stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(before)
    progress.finish()
    return runner.findings


def _wait(futures: Sequence[Future[None]]) -> None:
    pending = set(futures)
    while pending:
        # With a timeout, Ctrl-C is handled promptly.
        done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


@dataclass
class _Runner:
    plan: MergePlan
    writer: QuantisingWriter
    progress: Progress
    device: torch.device
    memory: int
    allow_nonfinite: bool
    keeper: ModelKeeper | None

    def __post_init__(self) -> None:
        self.budget = MemoryBudget(self.memory)
        self.stream = OwnStream(self.device)
        self.stopped = threading.Event()
        self.findings = Findings()
        # Quantised tensors are rounded once, from float32.
        self.dtypes = {
            t.name: torch.float32 if t.name in self.plan.quantised else t.dtype.torch
            for t in self.plan.tensors
        }

    def run(self, block: MergeBlock, soon: MergeBlock | None = None) -> None:
        """Merge or copy one block, and prefetch `soon`, a later one."""
        if self.stopped.is_set():
            raise StoppedError
        for source in (s for merge in (soon.merges if soon else ()) for s in merge.reads):
            self.plan.models[source.model].checkpoint.prefetch(source.tensor, source.slot.rows)
        with torch.inference_mode(), self.budget.hold(block.working_bytes), self.stream.entered():
            try:
                result = self._merge(block) if block.merges else self._copy(block)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise ResourceError(
                    f"{self.device} has too little free memory to merge {block.tensor}",
                    hint='use `device="cpu"`, or free memory on the device',
                ) from error
            if not is_finite(result):
                if not self.allow_nonfinite:
                    raise NumericalError(
                        f"the merged tensor {block.tensor} holds values that {result.dtype} cannot",
                        hint="choose a wider dtype or out_dtype (bfloat16, float32), or smaller "
                        "weights",
                    )
                self.findings.note_nonfinite("the merged model", block.tensor)
            row = 0 if block.rows is None else block.rows[0]
            self.writer.write(block.tensor, result, row=row)
        self.progress.advance(result.numel() * self.plan.dtypes[block.tensor].itemsize)

    def _merge(self, block: MergeBlock) -> Tensor:
        out_dtype = self.dtypes[block.tensor]
        if block.merges[0].large is not None:
            return self._merge_run(block, block.merges[0], block.merges[0].large)
        read = functools.cache(self._read)  # a stored block may hold several units (gate and up)
        whole = len(block.merges) == 1 and block.merges[0].unit.slot.covers_block
        result = None if whole else torch.empty(block.shape, dtype=out_dtype)
        for merge in block.merges:
            stored = [s.slot.take(read(s.model, s.tensor, s.slot.rows)) for s in merge.reads]
            if result is None:
                merged = self._apply(merge, self._unit(merge), stored)
                return merged.to("cpu", out_dtype).reshape(block.shape).contiguous()
            merge.unit.slot.take(result).copy_(self._apply(merge, self._unit(merge), stored))
        assert result is not None
        return result

    def _merge_run(self, block: MergeBlock, merge: UnitMerge, large: LargeUnit) -> Tensor:
        """Merge some rows of a large unit. The first call surveys the whole unit."""
        assert block.rows is not None
        unit = self._unit(merge)
        with large.lock:
            if large.keeps is None:
                shape = large.merge.unit.shape
                large.keeps = merge.method.survey(
                    self._differences(large), len(merge.inputs), shape, merge.arguments, unit
                )
        *tensors, base = self._run_inputs(merge)
        first = block.rows[0]
        result = merge.method.merge_rows(tensors, base, merge.arguments, unit, large.keeps, first)
        return result.to("cpu", self.dtypes[block.tensor])

    def _differences(self, large: LargeUnit) -> Blocks:
        """Return the task vectors of a large unit's models, some rows at a time."""

        def blocks(i: int) -> Iterator[Tensor]:
            for rows in large.runs:
                if self.stopped.is_set():
                    raise StoppedError
                part = in_rows(large.merge, rows)
                tensor, base = self._run_inputs(replace(part, inputs=part.inputs[i : i + 1]))
                yield (tensor - base).view(rows_and_columns(base.shape))

        return blocks

    def _run_inputs(self, merge: UnitMerge) -> list[Tensor]:
        """Read the models' rows of a unit, then the base's."""
        reads = [self._read(s.model, s.tensor, s.slot.rows) for s in merge.reads]
        *tensors, base = map(self._widen, reads)
        scales = [source.scale for source in merge.inputs]
        return [*(_scaled(x, base, s) for x, s in zip(tensors, scales, strict=True)), base]

    def _unit(self, merge: UnitMerge) -> UnitInfo:
        key, models = merge.unit.key, tuple(source.model for source in merge.inputs)
        remark = functools.partial(self.findings.remark, key)
        return UnitInfo(key, merge.unit.role, self.plan.seed, models, self.stopped.is_set, remark)

    def _apply(self, merge: UnitMerge, unit: UnitInfo, stored: Sequence[Tensor]) -> Tensor:
        """Return the method's result, inside the wrappers, for tensors in their stored dtype."""
        tensors = [self._widen(tensor) for tensor in stored]
        if merge.prepare is not None:
            tensors = merge.prepare(tensors)
        base = None if merge.base is None else tensors[-1]
        kind = merge.method.schema.statistics
        inputs, statistics = [], []
        for tensor, source in zip(tensors, merge.inputs, strict=False):
            inputs.append(tensor if base is None else _scaled(tensor, base, source.scale))
            statistics.append(read_statistics(self.plan, merge, source, tensor, unit, kind))

        def method(inputs: Sequence[Tensor], base: Tensor | None) -> Tensor:
            return merge.method.merge(inputs, base, merge.arguments, unit, statistics)

        if merge.base is None or base is None:
            return method(inputs, None)
        inner: Inner = method
        for wrapper, arguments in merge.wraps:
            kind = wrapper.schema.statistics
            known = read_statistics(self.plan, merge, merge.base, base, unit, kind)
            inner = wrapper.around(inner, arguments, unit, known)
        result = inner(inputs, base)
        if self.keeper is not None:
            self.keeper.keep(merge, tensors, base, result)
        return result

    def _widen(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device, in the precision that methods use."""
        if self.plan.input_dtype is not None:
            tensor = tensor.to(self.plan.input_dtype.torch)
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        return tensor.to(self.device).to(wide)  # transfer the narrow dtype

    def _copy(self, block: MergeBlock) -> Tensor:
        assert block.copy is not None
        first = self._read(block.copy.model, block.copy.tensor, block.rows)
        for other in block.must_equal:
            if not torch.equal(first, self._read(other.model, other.tensor, block.rows)):
                names = [self.plan.models[s.model].label for s in (block.copy, other)]
                raise CheckpointError(
                    f"integer tensor {block.tensor} differs between {names[0]} and {names[1]}",
                    hint="integers cannot be averaged: the models are not fine-tunes of one base",
                )
        return first.to(self.dtypes[block.tensor])

    def _read(self, model: str, name: str, rows: RowRange | None) -> Tensor:
        opened = self.plan.models[model]
        tensor = opened.checkpoint.read(name, rows)
        if not is_finite(tensor):
            if not self.allow_nonfinite:
                bad = int((~tensor.isfinite()).sum())
                raise NumericalError(
                    f"{opened.label}: tensor {name} holds {bad} non-finite values "
                    f"(NaN or infinity) among {tensor.numel()}",
                    hint="repair that model, or merge anyway with `allow_nonfinite=True`",
                )
            self.findings.note_nonfinite(opened.label, name)
        return tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether there is no NaN or infinity. Integers are finite."""
    if not tensor.is_floating_point():
        return True
    # One pass at memory speed: a finite sum has only finite terms.
    return math.isfinite(tensor.sum().item()) or bool(tensor.isfinite().all())


def _scaled(tensor: Tensor, base: Tensor, scale: float | NeuronScale) -> Tensor:
    """Return the model's tensor with its change from the base times `scale`."""
    if isinstance(scale, NeuronScale):
        return torch.lerp(base, tensor, neuron_shares(scale, tensor))
    return tensor if scale == 1.0 else torch.lerp(base, tensor, scale)
