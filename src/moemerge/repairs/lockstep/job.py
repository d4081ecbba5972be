"""The skeleton of every repair: request, checked job, and the steps from one to the other.

steps = RepairSteps(        # what a repair adds
    require=...,            # refuse models that it cannot repair
    rehearse=...,           # compile GPU kernels while text is read
    prepare=...,            # read text, pair routers: a `RepairJob`
    compute=...,            # the work: entries into `run.output`, a report
)
run_repair(request, progress, steps)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from moemerge.checkpoint.patch import Quantised
from moemerge.config.settings import ForwardSettings
from moemerge.families.opened import OpenModel
from moemerge.forward.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.repairs.lockstep.experts import ExpertMaps, find_maps
from moemerge.repairs.lockstep.inputs import JobText, source_weights
from moemerge.repairs.lockstep.output import Output
from moemerge.repairs.lockstep.output_files import output_files
from moemerge.repairs.lockstep.report import RepairReport
from moemerge.repairs.lockstep.request import RepairRequest, open_models, open_output
from moemerge.repairs.lockstep.warm_up import WarmUp
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.process import disk_bytes_read
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import Ranks, own_device
from moemerge.text.batches import Batch, make_batches, own_share

S = TypeVar("S", bound=ForwardSettings)


@dataclass(frozen=True, kw_only=True)
class OpenedRepair(Generic[S]):
    """A repair whose models were opened and checked."""

    request: RepairRequest[S]
    merged: OpenModel
    sources: Mapping[str, OpenModel]
    stream: StreamSettings
    ranks: Ranks

    @cached_property
    def experts(self) -> ExpertMaps:
        """The maps of sources with more experts than the model."""
        return find_maps(self.merged, list(self.sources.values()), self.request.experts)


@dataclass(frozen=True, kw_only=True)
class RepairJob(OpenedRepair[S], ABC):
    """A repair that can be run: everything that can be refused was checked."""

    text: JobText
    notices: tuple[str, ...]

    @cached_property
    def weights(self) -> dict[str, float]:
        """How much each source counts, with a mean of 1."""
        return source_weights(self.request.weights, self.sources)

    @cached_property
    def all_batches(self) -> tuple[Batch, ...]:
        """The batches of all ranks."""
        return tuple(make_batches(self.text.domains, batch_tokens=self.batch_tokens))

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The batches of this rank."""
        return tuple(own_share(self.all_batches, self.ranks))

    @property
    def batch_tokens(self) -> int:
        return batch_tokens(self.merged, self.stream.device)

    @property
    @abstractmethod
    def key(self) -> dict[str, Any]:
        """Everything that the result depends on, as plain data: the key of the journal."""


@dataclass(frozen=True)
class RepairRun:
    """What a running repair works with."""

    output: Output
    warm_up: WarmUp
    progress: Progress
    start: float  # time.perf_counter() when it began


J = TypeVar("J", bound=RepairJob[Any])
R = TypeVar("R", bound=RepairReport)


@dataclass(frozen=True, kw_only=True)
class RepairSteps(Generic[S, J, R]):
    """The steps in which repairs differ."""

    # Refuse a merged model that cannot be repaired.
    require: Callable[[OpenModel], None]
    # Refuse what the headers and settings show, before OUT is opened.
    check: Callable[[OpenedRepair[S]], None] = lambda opened: None
    # Compute something small with the kernels of the repair, so that they are compiled.
    rehearse: Callable[[OpenedRepair[S]], None] = lambda opened: None
    # Read the text, and refuse everything else that can be refused.
    prepare: Callable[[OpenedRepair[S]], J]
    # Do the work: add finished entries to the output, and return the report.
    compute: Callable[[J, RepairRun], R]
    # Return how changed tensors of a quantised model are stored.
    stored_as: Callable[[S], Quantised] = lambda settings: "keep"


def run_repair(request: RepairRequest[S], progress: Progress, steps: RepairSteps[S, J, R]) -> R:
    """Repair into `request.out`, which appears complete or not at all.

    A run that is killed or interrupted leaves a journal of its finished entries next to OUT. Under
    torchrun each process computes a share, and rank 0 writes.
    """
    start, read_before = time.perf_counter(), disk_bytes_read()
    settings = request.settings
    ranks = Ranks.join(resolve_device(settings.device))
    progress = ranks.progress(progress)
    with WarmUp() as warm_up:
        merged, sources = open_models(request, steps.require)
        device = own_device(resolve_device(settings.device))
        stream = StreamSettings(
            device, forward_dtype(settings.dtype, merged, device), settings.offload
        )
        opened = OpenedRepair(
            request=request, merged=merged, sources=sources, stream=stream, ranks=ranks
        )
        steps.check(opened)
        warm_up.begin(device, partial(steps.rehearse, opened))
        with open_output(request, merged, sources, ranks, steps.stored_as(settings)) as output:
            job = steps.prepare(opened)
            for notice in job.notices:
                progress.note(notice)
            report = steps.compute(job, RepairRun(output, warm_up, progress, start))
            computed = time.perf_counter()
            if "read" in report.timings.beside:
                files = ranks.total(report.timings.beside["read"][1], device)
                disk = ranks.disk_bytes_since(read_before)
                report = replace(report, bytes_read={"files": files, "disk": disk})
            ranks.barrier()  # other ranks may still read the journal
            report = report.with_rounding(ranks.broadcast_object(output.write()))
            output.finish(output_files(job.request, merged, report))
    timings = report.timings.written(time.perf_counter() - computed, output.copied)
    return replace(report, timings=timings, seconds=time.perf_counter() - start)
