"""A refit from merged folder to refitted folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.patch import Quantised
from moemerge.errors import ResourceError
from moemerge.features.input_hooks import ExpertsHook, UnitMap
from moemerge.features.settings import HEADROOM
from moemerge.features.spill import Offload
from moemerge.linalg.cg import Status
from moemerge.lockstep.journal import Entry
from moemerge.lockstep.models import OverlaidCheckpoint
from moemerge.lockstep.output import Output, RefusedResultError
from moemerge.lockstep.repairs import RepairReport, open_output, output_files
from moemerge.lockstep.streams import PROCESS_BYTES
from moemerge.lockstep.warm_up import WarmUp
from moemerge.refitting.experts import sample_size
from moemerge.refitting.head import GROUP
from moemerge.refitting.linear import BLOCK_VALUES
from moemerge.refitting.loop import FinishedLayer, RefitLoop
from moemerge.refitting.plan import RefitPlan, make_plan, planned_names
from moemerge.refitting.prepare import RefitJob, RefitRequest, prepare
from moemerge.refitting.report import (
    RefitReport,
    few_tokens,
    kind_of,
    lacks_nothing,
    map_errors,
)
from moemerge.refitting.ridge import RidgeRule
from moemerge.refitting.routers import RouterJob
from moemerge.refitting.streams import RefitStreams, build_streams, require_same_shapes
from moemerge.runtime import ranks
from moemerge.runtime.devices import available_memory, resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.progress import Progress
from moemerge.runtime.timing import Timings, peak_memory

HEAD = "head"


def run_refit(request: RefitRequest, progress: Progress) -> RefitReport:
    """Refit into `request.out`, which appears whole or not at all.

    A run that is killed or interrupted leaves a journal of its finished layers next to OUT. Under
    torchrun every process runs a share of the text and fits a share of the experts.
    """
    start = time.perf_counter()
    ranks.join(resolve_device(request.settings.device))
    progress = ranks.progress_of_lead(progress)
    stored: Quantised = "same" if request.settings.requantize == "same" else "floats"
    with WarmUp() as warm_up:
        job = prepare(request, warm_up)
        for notice in job.notices:
            progress.note(notice)
        with open_output(request, job.merged, job.sources, stored) as output:
            run = _Run(job, output, warm_up, progress, start)
            report = run.run()
            fitted = time.perf_counter()
            ranks.meet()  # others may still read the journal
            report = replace(report, requantised=ranks.from_lead(output.write()))
            output.finish(output_files(request, job.merged, report))
    timings = report.timings.written(time.perf_counter() - fitted, output.copied)
    return replace(report, timings=timings, seconds=time.perf_counter() - start)


class _Run:
    """One refit on its way."""

    def __init__(
        self, job: RefitJob, output: Output, warm_up: WarmUp, progress: Progress, start: float
    ) -> None:
        self.job = job
        self.output = output
        self.warm_up = warm_up
        self.progress = progress
        self.start = start

    def run(self) -> RefitReport:
        job, output = self.job, self.output
        overlay: dict[str, Callable[[], Tensor]] = {}
        checkpoint = OverlaidCheckpoint(job.merged.checkpoint, overlay)
        with open_streams(job, checkpoint, self.warm_up, self.progress) as streams:
            require_same_shapes(streams, job.sources)
            plan, units = self._plan(streams)
            names = planned_names(plan, units)
            output.begin(job.key, names, resume=job.request.resume)
            ridge = RidgeRule(job.ridge)
            done = self._finished(plan, overlay, ridge)
            loop = RefitLoop(
                streams=streams,
                batches=job.batches,
                plan=plan,
                units=units,
                routers=RouterJob(
                    job.merged,
                    job.sources,
                    job.routers,
                    job.weights,
                    exact=job.request.settings.router == "exact",
                ),
                scales=job.scales,
                ridge=ridge,
                on_done=self._done,
                before_fits=self.warm_up.wait,
                done_before=done,
            )
            loop.run()
            output.check()
            report = self._report(streams, plan)
            for notice in few_tokens(report.layers):
                self.progress.note(notice)
            return report

    def _plan(self, streams: RefitStreams) -> tuple[RefitPlan, UnitMap]:
        job, stream = self.job, streams.merged.stream
        units = UnitMap(job.merged.checkpoint, job.merged.architecture, stream.names)
        plan = make_plan(
            stream.anatomy,
            stream.input_hooks,
            units,
            job.routers,
            layers=job.layers,
            parts=job.request.settings.parts,
        )
        for runner in streams.runners:
            runner.final.head = plan.head
        for notice in plan.notices:
            self.progress.note(notice)
        return plan, units

    def _finished(
        self, plan: RefitPlan, overlay: dict[str, Callable[[], Tensor]], ridge: RidgeRule
    ) -> set[int]:
        """Layers that a killed run had finished: the model is streamed with their new tensors, and
        the next λ is sought where that run would have begun."""
        done = set()
        for layer in plan.layers:
            if not layer.pauses:
                continue
            entry = self.output.finished(_name(layer.number))
            if entry is None:
                break
            overlay.update({n: partial(entry.tensors.__getitem__, n) for n in entry.tensors})
            self._require(entry.row)
            ridge.last.update({kind_of(m): m["ridge"] for m in entry.row["maps"] if "ridge" in m})
            done.add(layer.number)
        if self.job.request.resume:
            self.progress.note(f"{len(done)} finished layers found, the rest is refitted")
        return done

    def _done(self, finished: FinishedLayer) -> None:
        self.output.check()
        row = finished.row.to_json()
        self._require(row)
        for notice in row["notices"]:
            self.progress.note(notice)
        self._tell(row)
        tensors = finished.tensors if self.job.request.write else {}
        self.output.add(Entry(_name(finished.row.layer), tensors, row))

    def _require(self, row: Mapping[str, Any]) -> None:
        """With `strict`, also of layers that a run without it had finished."""
        if self.job.request.settings.strict and row["notices"]:
            bad = [m for m in row["maps"] if m.get("status", Status.CONVERGED) != Status.CONVERGED]
            kept = [m for m in row["maps"] if m["kept"] is True and not lacks_nothing(m)]
            if bad or kept:
                raise RefusedResultError(
                    row["notices"][0], hint="give more text, or leave `strict` out"
                )

    def _tell(self, row: Mapping[str, Any]) -> None:
        where = "head" if row["layer"] is None else f"layer {row['layer']}"
        errors = [map_errors(m) for m in row["maps"] if "router" not in m]
        before, after = sum(b for b, _ in errors), sum(a for _, a in errors)
        left = f", {after / before:.0%} of the error left" if before else ""
        drift = ""
        if row["drift_before"] and row["drift_after"]:
            old, new = (_mean(row[key]) for key in ("drift_before", "drift_after"))
            drift = f", drift {old:.3g} → {new:.3g}"
        self.progress.note(f"{where}: {len(row['maps'])} maps{left}{drift}")

    def _report(self, streams: RefitStreams, plan: RefitPlan) -> RefitReport:
        job = self.job
        fitted = time.perf_counter() - self.start
        layers = tuple(entry.row for entry in self.output.entries)
        stopwatch = streams.merged.stream.stopwatch
        tokens = {domain.name: domain.tokens for domain in job.text.domains}
        held = {domain.name: sum(map(len, domain.holdout)) for domain in job.text.domains}
        return RefitReport(
            **RepairReport.asked(job.request),
            device=str(job.device),
            dtype=dtype_name(job.dtype),
            offload=streams.offload,
            memory=expected_bytes(job, streams),
            resumed=self.output.resumed,
            tokens=tokens,
            held_out_tokens=held,
            layers=layers,
            notices=(
                *job.notices,
                *plan.notices,
                *(notice for layer in layers for notice in layer["notices"]),
                *few_tokens(layers),
            ),
            seconds=fitted,
            timings=Timings.of(stopwatch, fitted, peak_memory(job.device)),
        )


def _name(layer: int | None) -> str:
    return HEAD if layer is None else f"layer {layer}"


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


# --- memory -------------------------------------------------------------------------------------


def expected_bytes(job: RefitJob, streams: RefitStreams) -> int:
    """What the device will hold of this process at the most."""
    own = PROCESS_BYTES if job.device.type == "cpu" else 0
    models = [runner.stream.memory for runner in streams.runners]
    total = sum(memory.on_device for memory in models)
    # One of them runs at a time.
    total -= sum(memory.running for memory in models) - max(memory.running for memory in models)
    if streams.merged.stream.memory.offload == "device" and not any(b.padded for b in job.batches):
        total -= sum(memory.features for memory in models)  # read where they wait
    return own + total + refit_bytes(job, streams)


def open_streams(
    job: RefitJob, checkpoint: Checkpoint, warm_up: WarmUp, progress: Progress
) -> RefitStreams:
    """Build all models, and choose where activations are parked; refuses what fits nowhere."""
    wanted = job.request.settings.offload
    kinds: tuple[Offload, ...] = (
        ("device", "disk") if job.device.type == "cpu" else ("device", "cpu", "disk")
    )
    for kind in kinds if wanted == "auto" else (wanted,):
        streams = build_streams(job, checkpoint, kind, progress)
        needed = expected_bytes(job, streams)
        if needed > usable_bytes(job):
            warm_up.wait()  # it holds some of the device
        free = usable_bytes(job)
        if needed <= free:
            return streams
        described = streams.merged.stream.memory.describe()
        streams.close()
    raise ResourceError(
        f"refitting needs about {needed / 1e9:.1f} GB on {job.device}, and {free / 1e9:.1f} GB are "
        f"usable. {described}, and the same for {len(job.sources)} sources",
        hint="lower `max_tokens` or `max_length`"
        + ("" if wanted in ("auto", "disk") else '; `offload="disk"` parks activations there'),
    )


def usable_bytes(job: RefitJob) -> int:
    return int(available_memory(job.device) * HEADROOM)


# Hidden states of every token that are kept of a layer: of its source what two norms give, what
# attention says and the states before and after; of the merged model what is read now, what its
# attention says and the state before. What experts read lies joined by domain once more, of both;
# what the hidden state lacks is float32 at least.
SOURCE_STATES = 6
MERGED_STATES = 4
MISSING_STATES = 1
# Batches that wait on the device hold most of these themselves; this many they do not.
MORE_STATES = 2
# Of a map's Gram and cross products, in float64: the sums, their factor, the solution and what is
# compared with it, for calibration and held-out rows.
SUM_COPIES = 6
BLOCKS = 4  # of outputs in float32 at a time


def refit_bytes(job: RefitJob, streams: RefitStreams) -> int:
    """Records of a layer, the largest map's sums, and blocks of outputs."""
    stream = streams.merged.stream
    width = job.merged.architecture.hidden_size or 0
    tokens = sum(batch.tokens for batch in job.batches)
    waiting = stream.memory.offload == "device"
    kept = MORE_STATES if waiting else SOURCE_STATES + MERGED_STATES
    states = kept * tokens * width * job.dtype.itemsize
    states += MISSING_STATES * tokens * width * max(4, job.dtype.itemsize)
    largest = 0
    for hooks in stream.input_hooks.layers:
        for hook in hooks:
            if isinstance(hook, ExpertsHook):
                # Experts go one by one; the sums of those that choose λ are held together, and on
                # a GPU the next ones' come while an expert is fitted.
                for name in (hook.up, hook.down):
                    shape = stream.model.get_parameter(name).shape[1:]
                    held = 2 * sample_size(shape) if job.ridge is None else 2
                    largest = max(largest, (SUM_COPIES + held) * _values(shape))
            else:
                largest = max(largest, SUM_COPIES * _values(hook.shape))
    head = stream.input_hooks.head
    resident = 0
    if head is not None and "head" in job.request.settings.parts:
        rows, inputs = head.shape
        largest = max(largest, SUM_COPIES * inputs * (inputs + min(rows, GROUP)))
        resident = (2 + len(job.sources)) * rows * inputs * job.dtype.itemsize
        resident += 2 * tokens * inputs * job.dtype.itemsize
    block = BLOCK_VALUES.get(job.device.type, BLOCK_VALUES["cpu"])
    return max(states, resident) + 8 * largest + 4 * BLOCKS * block


def _values(shape: tuple[int, ...]) -> int:
    """Of a Gram and of cross products, whichever side is the input."""
    return max(shape) ** 2 + shape[0] * shape[1]
