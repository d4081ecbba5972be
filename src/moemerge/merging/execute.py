"""Run a merge plan: read, compute and write many blocks at once, within a fixed memory budget.

Each worker carries a block all the way (read -> method -> write), so while one waits for the disk
another computes. Blocks land at their own place in the output, so their order does not matter and
the result is the same for any number of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.checkpoint import CheckpointWriter
from moemerge.errors import CheckpointError, NumericalError
from moemerge.merging.method import ModelTensor, UnitInfo
from moemerge.merging.plan import Block, MergePlan, Source, UnitMerge
from moemerge.runtime.allocator import reuse_freed_memory
from moemerge.runtime.devices import cpu_count
from moemerge.runtime.progress import Progress

# Enough for several expert matrices in flight; one larger block may always run alone.
DEFAULT_MEMORY_BUDGET = 768 * 2**20
# One worker more than cores: somebody can wait for the disk.
SPARE_WORKERS = 1
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ExecutionSettings:
    """How a plan is run; nothing here changes the result."""

    device: torch.device
    memory_budget: int = DEFAULT_MEMORY_BUDGET
    workers: int | None = None
    allow_nonfinite: bool = False


class MemoryBudget:
    """Lets work in while its bytes fit; a piece larger than the whole budget runs alone."""

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
    plan: MergePlan, writer: CheckpointWriter, settings: ExecutionSettings, progress: Progress
) -> None:
    """Compute and write every block of `plan`. Raises the first error; the caller aborts."""
    reuse_freed_memory()
    runner = _Runner(plan, writer, settings, progress)
    workers = settings.workers or cpu_count() + SPARE_WORKERS
    progress.start("merging", plan.bytes_written, unit="B")
    # Largest first: a big embedding must not be what everybody waits for at the end.
    order = sorted(plan.blocks, key=lambda b: -b.working_bytes)
    with _one_thread_each(), ThreadPoolExecutor(workers, thread_name_prefix="merge") as pool:
        futures = [pool.submit(runner.run, block) for block in order]
        try:
            _wait(futures)
        except BaseException:
            runner.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    progress.finish()


def _wait(futures: Sequence[Future[None]]) -> None:
    pending = set(futures)
    while pending:
        # A timeout, so that Ctrl-C is seen at once.
        done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Blocks run side by side, so torch must not split each of them over all cores as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Runner:
    def __init__(
        self,
        plan: MergePlan,
        writer: CheckpointWriter,
        settings: ExecutionSettings,
        progress: Progress,
    ) -> None:
        self.plan = plan
        self.writer = writer
        self.settings = settings
        self.progress = progress
        self.budget = MemoryBudget(settings.memory_budget)
        self.stopped = threading.Event()
        self.dtypes = {t.name: t.dtype for t in plan.tensors}

    @torch.inference_mode()
    def run(self, block: Block) -> None:
        if self.stopped.is_set():
            return
        with self.budget.hold(block.working_bytes):
            result = self._merge(block) if block.merges else self._copy(block)
            row = 0 if block.rows is None else block.rows[0]
            self.writer.write(block.tensor, result, row=row)
        self.progress.advance(result.numel() * result.element_size())

    def _merge(self, block: Block) -> Tensor:
        blocks = _BlockReader(self.plan)
        out_dtype = self.dtypes[block.tensor]
        whole = len(block.merges) == 1 and block.merges[0].unit.slot.covers_block
        result = None if whole else torch.empty(block.shape, dtype=out_dtype)
        for merge in block.merges:
            value = self._apply(merge, blocks)
            if result is None:
                return value.to("cpu", out_dtype).reshape(block.shape).contiguous()
            merge.unit.slot.take(result).copy_(value)
        assert result is not None
        return result

    def _apply(self, merge: UnitMerge, blocks: _BlockReader) -> Tensor:
        tensors = [self._load(source, blocks) for source in merge.sources]
        if merge.prepare is not None:
            tensors = merge.prepare(tensors)
        inputs = [
            ModelTensor(tensor, source.params)
            for tensor, source in zip(tensors, merge.inputs, strict=False)
        ]
        base = None if merge.base is None else tensors[-1]
        unit = UnitInfo(merge.unit.key, merge.unit.role, self.plan.seed)
        return merge.method.function(inputs, base, merge.options, unit)

    def _load(self, source: Source, blocks: _BlockReader) -> Tensor:
        """The unit in this source, on the device, in the precision methods work in."""
        tensor = source.slot.take(blocks.read(source))
        if self.plan.input_dtype is not None:
            tensor = tensor.to(self.plan.input_dtype)
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        tensor = tensor.to(self.settings.device, wide)
        if not self.settings.allow_nonfinite:
            self._require_finite(tensor, source)
        return tensor

    def _require_finite(self, tensor: Tensor, source: Source) -> None:
        # One pass at memory speed in the good case: a finite sum has only finite terms.
        if bool(tensor.sum().isfinite()):
            return
        bad = int((~tensor.isfinite()).sum())
        if bad:
            model = self.plan.models[source.model]
            raise NumericalError(
                f"{model.checkpoint.label}: tensor {source.tensor} holds {bad} non-finite values "
                f"(NaN or infinity) among {tensor.numel()}",
                hint="repair that model, or merge anyway with --allow-nonfinite",
            )

    def _copy(self, block: Block) -> Tensor:
        assert block.copy is not None
        first = self._raw(block.copy, block)
        for other in block.must_equal:
            if not torch.equal(first, self._raw(other, block)):
                names = [self.plan.models[s.model].checkpoint.label for s in (block.copy, other)]
                raise CheckpointError(
                    f"integer tensor {block.tensor} differs between {names[0]} and {names[1]}",
                    hint="integers cannot be averaged: the models are not fine-tunes of one base",
                )
        return first.to(self.dtypes[block.tensor])

    def _raw(self, source: Source, block: Block) -> Tensor:
        tensor = self.plan.models[source.model].checkpoint.read(source.tensor, block.rows)
        if tensor.is_floating_point() and not self.settings.allow_nonfinite:
            self._require_finite(tensor.float(), source)
        return tensor


class _BlockReader:
    """Reads each stored block once, though several units (gate and up) may lie in it."""

    def __init__(self, plan: MergePlan) -> None:
        self._models = plan.models
        self._blocks: dict[tuple[int, str, tuple[int, int] | None], Tensor] = {}

    def read(self, source: Source) -> Tensor:
        key = (source.model, source.tensor, source.slot.rows)
        if key not in self._blocks:
            checkpoint = self._models[source.model].checkpoint
            self._blocks[key] = checkpoint.read(source.tensor, source.slot.rows)
        return self._blocks[key]
