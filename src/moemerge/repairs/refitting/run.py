"""Run a refit, from the merged folder to the refitted folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moemerge.checkpoint.patch import Quantised
from moemerge.checkpoint.reader import OverlaidCheckpoint
from moemerge.config.repair_settings import RefitSettings
from moemerge.families.opened import OpenModel
from moemerge.forward.input_hooks import ExpertsHook, UnitMap
from moemerge.repairs.lockstep.job import OpenedRepair, RepairRun, RepairSteps, run_repair
from moemerge.repairs.lockstep.report import RepairReport
from moemerge.repairs.lockstep.streams import Need, open_streams, process_bytes, start_note
from moemerge.repairs.lockstep.warm_up import router_like
from moemerge.repairs.refitting.experts import sample_size
from moemerge.repairs.refitting.gradient import HEAD_VALUES
from moemerge.repairs.refitting.job import RefitJob, RefitRequest, check, prepare
from moemerge.repairs.refitting.least_squares import Factor, FitSums, fit_map
from moemerge.repairs.refitting.linear import BLOCK_VALUES, GROUP
from moemerge.repairs.refitting.loop import RefitLoop
from moemerge.repairs.refitting.plan import RefitPlan, make_plan, planned_names
from moemerge.repairs.refitting.report import RefitReport, few_tokens
from moemerge.repairs.refitting.routers import fit_router
from moemerge.repairs.refitting.streams import RefitStreams, build_streams, require_same_shapes
from moemerge.routing.products import logits_of, working_dtype
from moemerge.runtime.progress import Progress

REHEARSAL_RIDGE = 0.1


def run_refit(request: RefitRequest, progress: Progress) -> RefitReport:
    """Refit into `request.out`. The journal has an entry for every layer."""
    steps = RepairSteps(
        require=_require,
        check=check,
        rehearse=fit_once,
        prepare=prepare,
        compute=_compute,
        stored_as=_stored_as,
    )
    return run_repair(request, progress, steps)


def _require(merged: OpenModel) -> None:
    merged.require_readable("dequantise it to bfloat16 first and refit that")


def _stored_as(settings: RefitSettings) -> Quantised:
    return "same" if settings.requantize == "same" else "floats"


def _compute(job: RefitJob, run: RepairRun) -> RefitReport:
    overlay: dict[str, Callable[[], Tensor]] = {}
    checkpoint = OverlaidCheckpoint(job.merged.checkpoint, overlay)
    opened = open_streams(
        lambda settings: build_streams(job, checkpoint, settings, run.progress),
        partial(memory_need, job),
        replace(job.stream, gather=False, readers=job.ranks),
        run.warm_up.wait,
    )
    with closing(opened) as streams:
        require_same_shapes(streams, job.sources, job.experts)
        models = [runner.stream for runner in streams.runners]
        run.progress.note(start_note(models, memory_need(job, streams)))
        plan, units = _plan(job, streams)
        for notice in plan.notices:
            run.progress.note(notice)
        names = planned_names(plan, units)
        run.output.begin(job.key, names, replace=job.request.replaces_unfinished)
        loop = RefitLoop(job, run, streams, plan, units)
        overlay.update(loop.resume())
        loop.run()
        run.output.check()
        report = _report(job, run, streams, plan)
    for notice in few_tokens(report.layers):
        run.progress.note(notice)
    return report


def _plan(job: RefitJob, streams: RefitStreams) -> tuple[RefitPlan, UnitMap]:
    stream = streams.merged.stream
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
        runner.head = plan.head
    return plan, units


def _report(job: RefitJob, run: RepairRun, streams: RefitStreams, plan: RefitPlan) -> RefitReport:
    fitted, stopwatch = time.perf_counter() - run.start, streams.merged.stream.stopwatch
    layers = tuple(entry.row for entry in run.output.entries)
    return RefitReport(
        **RepairReport.run_fields(job.request, job.stream, stopwatch, fitted),
        experts=job.experts,
        offload=streams.offload,
        memory=process_bytes(streams.memory, memory_need(job, streams).extra),
        resumed=run.output.resumed,
        tokens={domain.name: domain.tokens for domain in job.text.domains},
        held_out_tokens={d.name: sum(map(len, d.holdout)) for d in job.text.domains},
        layers=layers,
        notices=(
            *job.notices,
            *plan.notices,
            *(notice for layer in layers for notice in layer["notices"]),
            *few_tokens(layers),
        ),
    )


# --- memory -------------------------------------------------------------------------------------


def memory_need(job: RefitJob, streams: RefitStreams) -> Need:
    """Estimate the memory of a refit besides its streams."""
    models = streams.memory
    # One model runs at a time.
    shared = sum(memory.running for memory in models) - max(memory.running for memory in models)
    if streams.offload == "device" and not any(batch.padded for batch in job.batches):
        shared += sum(memory.features for memory in models)  # read without a copy
    extra = (training_bytes if job.by_gradient else refit_bytes)(job, streams) - shared
    # The journal stores a layer while the next one is copied from the device.
    copies = (2 if job.request.write else 1) if job.ranks.leads else 0
    layer = max(memory.layer for memory in models)
    return Need("refitting", extra, ["lower `max_tokens` or `max_length`"], copies * layer)


# Hidden states per token that are kept of a layer. Of its source: the outputs of two norms and of
# attention, and the states before and after. Of the merged model: the current input, the output of
# attention, and the state before. Inputs of experts are concatenated by domain once more, of both.
# The residual of the hidden state is float32 at least.
SOURCE_STATES = 6
MERGED_STATES = 4
MISSING_STATES = 1
# Batches that wait on the device hold most of these states, except this number.
MORE_STATES = 2
# Copies of a map's Gram and cross products in float64: the sums, their factor, the solution and the
# candidates compared with it, for calibration and held-out rows.
SUM_COPIES = 6
BLOCKS = 4  # of outputs in float32 at a time


def refit_bytes(job: RefitJob, streams: RefitStreams) -> int:
    """Return the bytes of a layer's records, the largest map's sums, and blocks of outputs."""
    stream = streams.merged.stream
    width = job.merged.architecture.hidden_size or 0
    tokens = sum(batch.tokens for batch in job.batches)
    waiting = stream.memory.offload == "device"
    kept = MORE_STATES if waiting else SOURCE_STATES + MERGED_STATES
    states = kept * tokens * width * job.stream.dtype.itemsize
    states += MISSING_STATES * tokens * width * max(4, job.stream.dtype.itemsize)
    largest = 0
    for hooks in stream.input_hooks.layers:
        for hook in hooks:
            if isinstance(hook, ExpertsHook):
                # Experts are fitted one by one. The sums of those that choose λ are held together,
                # and on a GPU the next sums overlap with a fit.
                for name in (hook.up, hook.down):
                    shape = stream.model.get_parameter(name).shape[1:]
                    held = 2 * sample_size(shape) if job.ridge is None else 2
                    values = max(shape) * sum(shape)  # whichever side is the input
                    largest = max(largest, (SUM_COPIES + held) * values)
            else:
                outputs, inputs = hook.shape
                largest = max(largest, SUM_COPIES * inputs * (inputs + outputs))
    head = stream.input_hooks.head
    resident = 0
    if head is not None and "head" in job.request.settings.parts:
        rows, inputs = head.shape
        largest = max(largest, SUM_COPIES * inputs * (inputs + min(rows, GROUP)))
        resident = (2 + len(job.sources)) * rows * inputs * job.stream.dtype.itemsize
        resident += 2 * tokens * inputs * job.stream.dtype.itemsize
    block = BLOCK_VALUES.get(job.stream.device.type, BLOCK_VALUES["cpu"])
    return max(states, resident) + 8 * largest + 4 * BLOCKS * block


# Of gradient steps, per weight: its gradient, first value and rounded value in the forward
# dtype; a float32 copy, its gradient and two moments.
WEIGHT_COPIES = 3
WEIGHT_FLOATS = 4
# Activations of a batch that its backward pass reads, in hidden states.
BACKWARD_STATES = 64


def training_bytes(job: RefitJob, streams: RefitStreams) -> int:
    """Return the bytes of two states of all tokens, a layer's gradients and a step."""
    stream, item = streams.merged.stream, job.stream.dtype.itemsize
    width = job.merged.architecture.hidden_size or 0
    copies = WEIGHT_COPIES * item + 4 * WEIGHT_FLOATS
    layers = [
        sum(p.numel() for p in stream.model.get_submodule(path).parameters())
        for path in stream.anatomy.layers
    ]
    step = BACKWARD_STATES * job.batch_tokens * width * item
    tokens = sum(batch.tokens for batch in job.batches)
    states = (1 + MORE_STATES) * tokens * width * item
    head = stream.input_hooks.head
    last = 0
    if head is not None and "head" in job.request.settings.parts:
        own = head.shape[0] * head.shape[1]
        last = own * (copies + (2 + len(job.sources)) * item) + 4 * 4 * HEAD_VALUES
    return states + max(max(layers) * copies + step, last)


# --- rehearsal ----------------------------------------------------------------------------------


def fit_once(opened: OpenedRepair[RefitSettings]) -> None:
    """Fit a random router of the model's shape, and a map with the same inputs."""
    stream, exact = opened.stream, opened.request.settings.router == "exact"
    problem = router_like(opened.merged, stream.device, stream.dtype)
    if problem is None:
        return
    if exact:
        domains = [
            replace(d, targets=[logits_of(x.to(working_dtype(x)), d.router) for x in d.features])
            for d in problem.domains
        ]
        problem = replace(problem, domains=domains)
    fit_router(problem, exact=exact)
    (x,) = problem.domains[0].features
    width, wide = x.shape[1], x.to(working_dtype(x))
    sums, held = (FitSums.empty(width, width, x.device) for _ in range(2))
    for one in (sums, held):
        one.add(x, wide, torch.full_like(wide[:, :1], 0.5))
    factor = Factor(sums.gram, REHEARSAL_RIDGE)
    fit_map(x.new_zeros(width, width), sums, held, factor, stream.dtype)
