"""Run a calibration, from the merged folder to the calibrated folder."""

from __future__ import annotations

import time
from dataclasses import replace

from moemerge.config.repair_settings import CalibrationSettings
from moemerge.repairs.calibration.job import (
    CalibrationJob,
    CalibrationRequest,
    memory_need,
    prepare,
)
from moemerge.repairs.calibration.layer import calibrate_layer
from moemerge.repairs.calibration.report import CalibrationReport, holdout_notices, totals
from moemerge.repairs.calibration.routers import RouterCalibrator, solve_settings
from moemerge.repairs.lockstep.job import OpenedRepair, RepairRun, RepairSteps, run_repair
from moemerge.repairs.lockstep.models import require_calibratable
from moemerge.repairs.lockstep.output import Output
from moemerge.repairs.lockstep.report import RepairReport
from moemerge.repairs.lockstep.streams import (
    Lockstep,
    open_lockstep,
    process_bytes,
    start_note,
    walk,
)
from moemerge.repairs.lockstep.warm_up import router_like
from moemerge.runtime.progress import Progress


def run_calibration(request: CalibrationRequest, progress: Progress) -> CalibrationReport:
    """Calibrate into `request.out`. The journal has an entry for every router."""
    steps = RepairSteps(
        require=require_calibratable, rehearse=solve_once, prepare=prepare, compute=_compute
    )
    return run_repair(request, progress, steps)


def _compute(job: CalibrationJob, run: RepairRun) -> CalibrationReport:
    routers, output = job.routers, run.output
    with open_lockstep(
        job.sides,
        job.batches,
        replace(job.stream, readers=job.ranks),
        layers=routers.layers,
        need=memory_need(job),
        progress=run.progress,
        settle=run.warm_up.wait,
    ) as lockstep:
        run.progress.note(start_note(lockstep.streams, memory_need(job)))
        stopwatch = lockstep.stopwatch
        stopwatch.count("prepare", time.perf_counter() - run.start - job.text.seconds)
        stopwatch.count("text", job.text.seconds)
        changed = [pair.info.weight for pair in routers.pairs]
        output.begin(job.key, changed, replace=job.request.replaces_unfinished)
        if output.resumed:
            run.progress.note(f"resuming a killed run: {output.resumed} routers are finished")
        visitor = RouterCalibrator(job, run, stopwatch)
        walk(lockstep, routers.pairs, visitor, output, job.ranks)
        report = _report(job, lockstep, output, time.perf_counter() - run.start)
    for notice in holdout_notices(report.totals):
        run.progress.note(notice)
    return report


def _report(
    job: CalibrationJob, lockstep: Lockstep, output: Output, seconds: float
) -> CalibrationReport:
    stopwatch = lockstep.stopwatch
    rows = tuple(entry.row for entry in output.entries)
    stopwatch.aside("copy", *output.copied)
    return CalibrationReport(
        **RepairReport.run_fields(job.request, job.stream, stopwatch, seconds),
        experts=job.experts,
        offload=lockstep.offload,
        memory=process_bytes(lockstep.memory, memory_need(job).extra),
        resumed=output.resumed,
        layers=rows,
        skipped=job.routers.skipped,
        notices=(
            *job.notices,
            *(notice for row in rows for notice in row["notices"]),
            *holdout_notices(totals(rows)),
        ),
    )


def solve_once(opened: OpenedRepair[CalibrationSettings]) -> None:
    """Solve for a random router of the model's shape."""
    stream, settings = opened.stream, solve_settings(opened.request.settings)
    problem = router_like(opened.merged, stream.device, stream.dtype)
    if problem is not None:
        calibrate_layer(problem, settings, start=problem.merged)
