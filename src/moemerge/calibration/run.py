"""A calibration from merged folder to calibrated folder."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from moemerge.architectures.opened import OpenModel
from moemerge.calibration.job import (
    CalibrationJob,
    CalibrationRequest,
    prepare,
    stream_settings,
)
from moemerge.calibration.layer import LayerProblem, calibrate_layer
from moemerge.calibration.report import CalibrationReport, holdout_notices, totals
from moemerge.calibration.solve import RouterSolver, memory_need, solve_settings
from moemerge.lockstep.models import require_calibratable
from moemerge.lockstep.output import Output
from moemerge.lockstep.repairs import RepairReport, open_models, open_output, output_files
from moemerge.lockstep.streams import Lockstep, open_lockstep
from moemerge.lockstep.walk import walk
from moemerge.lockstep.warm_up import RandomRouter, WarmUp, router_like
from moemerge.routing import SolveSettings
from moemerge.routing.compilation import compile_kernels
from moemerge.runtime import ranks
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.progress import Progress
from moemerge.runtime.timing import Timings, peak_memory


def run_calibration(request: CalibrationRequest, progress: Progress) -> CalibrationReport:
    """Calibrate into `request.out`, which appears whole or not at all.

    A run that is killed or interrupted leaves a journal of its finished routers next to OUT.
    """
    start = time.perf_counter()
    ranks.join(resolve_device(request.settings.device))
    with WarmUp() as warm_up:
        progress = ranks.progress_of_lead(progress)
        merged, sources = open_models(request, require_calibratable)
        stream = stream_settings(request, merged)
        settings = solve_settings(request.settings)
        warm_up.begin(
            stream.device, lambda: solve_once(merged, settings, stream.device, stream.dtype)
        )
        with open_output(request, merged, sources) as output:
            job = prepare(request, merged, sources, stream)
            return _run(job, output, warm_up, progress, start)


def _run(
    job: CalibrationJob, output: Output, warm_up: WarmUp, progress: Progress, start: float
) -> CalibrationReport:
    for notice in job.notices:
        progress.note(notice)
    need, routers = memory_need(job), job.routers
    with open_lockstep(
        job.sides,
        job.batches,
        job.stream,
        layers=routers.layers,
        need=need,
        progress=progress,
        settle=warm_up.wait,
    ) as lockstep:
        stopwatch = lockstep.stopwatch
        stopwatch.count("prepare", time.perf_counter() - start - job.text.seconds)
        stopwatch.count("text", job.text.seconds)
        changed = [pair.info.weight for pair in routers.pairs]
        output.begin(job.key, changed, resume=job.request.resume)
        if job.request.resume:
            progress.note(f"{output.resumed} finished routers found, the rest is solved")
        solver = RouterSolver(job, stopwatch, warm_up, progress)
        walk(lockstep, routers.pairs, solver, output)
        solved = time.perf_counter()
        report = _report(job, lockstep, output, solved - start)
        for notice in holdout_notices(report.totals):
            progress.note(notice)
        lockstep.close()  # its memory is of no more use, and writing may take a while
        output.finish(output_files(job.request, job.merged, report))
    written = report.timings.written(time.perf_counter() - solved, output.copied)
    return replace(report, timings=written, seconds=time.perf_counter() - start)


def _report(
    job: CalibrationJob, lockstep: Lockstep, output: Output, seconds: float
) -> CalibrationReport:
    request, stopwatch = job.request, lockstep.stopwatch
    rows = tuple(entry.row for entry in output.entries)
    stopwatch.aside("copy", *output.copied)
    return CalibrationReport(
        **RepairReport.asked(request),
        device=str(job.stream.device),
        dtype=dtype_name(job.stream.dtype),
        offload=lockstep.offload,
        memory=lockstep.process_bytes(memory_need(job).extra),
        resumed=output.resumed,
        layers=rows,
        skipped=job.routers.skipped,
        notices=(
            *job.notices,
            *(notice for row in rows for notice in row["notices"]),
            *holdout_notices(totals(rows)),
        ),
        seconds=seconds,
        timings=Timings.of(stopwatch, seconds, peak_memory(job.stream.device)),
    )


def solve_once(
    model: OpenModel, settings: SolveSettings, device: torch.device, dtype: torch.dtype
) -> None:
    """Solve for a random router of the model's shape."""
    router = router_like(model, device, dtype)
    if router is not None:
        compile_kernels(router.gate, router.domains[0], settings.curvature)
        problem = problem_of(router, dtype)
        calibrate_layer(problem, settings, start=problem.merged)


def problem_of(router: RandomRouter, dtype: torch.dtype) -> LayerProblem:
    selection = None
    if router.gate.selection_bias is not None:
        selection = router.merged.new_zeros(router.merged.shape[0])
    return LayerProblem(
        gate=router.gate,
        merged=router.merged,
        domains=router.domains,
        holdout=[],
        dtypes=(dtype, dtype if router.has_bias else None),
        selection_bias=selection,
        source_biases={domain.name: selection for domain in router.domains},
    )
