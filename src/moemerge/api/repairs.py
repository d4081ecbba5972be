"""Repairs of a merged model: run one, then measure the routing before and after it.

`config.repair_settings` declares repairs. Their Python functions here only add the signatures that
editors and type checkers read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from moemerge.api.jobs import files_of, output_for, settings_for, uploaded
from moemerge.config.models import ModelLike
from moemerge.config.repair_settings import (
    CALIBRATION,
    DISTILLATION,
    REFIT,
    CalibrationKeywords,
    CalibrationSettings,
    DistillKeywords,
    DistillSettings,
    RefitKeywords,
    RefitSettings,
)
from moemerge.config.repairs import Repair, RepairSettings
from moemerge.config.settings import OutputKeywords, OutputSettings, with_keywords
from moemerge.errors import ArchitectureError, MoeMergeError, TokenizerError, UsageError
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.ranks import SINGLE, Ranks, leads

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.diagnosis.page import BeforeAndAfter
    from moemerge.diagnosis.results import Diagnosis
    from moemerge.repairs.distilling.report import DistillReport
    from moemerge.repairs.harc_report import CalibrationReport
    from moemerge.repairs.lockstep.report import RepairReport
    from moemerge.repairs.lockstep.request import RepairRequest
    from moemerge.repairs.refitting.report import RefitReport


class CalibrateKeywords(CalibrationKeywords, OutputKeywords, total=False):
    """Keywords of `calibrate`."""


class DistillOutKeywords(DistillKeywords, OutputKeywords, total=False):
    """Keywords of `distill`."""


class RefitOutKeywords(RefitKeywords, OutputKeywords, total=False):
    """Keywords of `refit`."""


class _Inputs(NamedTuple):
    """What a repair reads besides the merged model."""

    sources: Mapping[str, ModelLike]
    data: Mapping[str, Files]
    weights: Mapping[str, float] | None
    check: Mapping[str, Files] | None
    experts: Mapping[str, str | Path] | None = None


@with_keywords(CalibrateKeywords, CalibrationSettings, OutputSettings)
def calibrate(
    merged: ModelLike,
    out: str | Path,
    *,
    sources: Mapping[str, ModelLike],
    data: Mapping[str, Files],
    weights: Mapping[str, float] | None = None,
    check: Mapping[str, Files] | None = None,
    experts: Mapping[str, str | Path] | None = None,
    settings: CalibrationSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[CalibrateKeywords],
) -> CalibrationReport:
    """Solve for the routers of `merged` and write the calibrated model to `out`.

    `sources` are the merged models and `data` their text (JSON lines or parquet), under the same
    names. `weights` set how much each counts (default: 1). `check` is text that is only measured,
    before and after. `experts` are JSON files with the kept experts of sources that have more
    experts than `merged`, if neither a report of moemerge nor equal router rows show them. Pass the
    settings as one object, or one by one: `calibrate(..., alpha=0.5, layers="8-15")`. `report` is
    an HTML page to write: a diagnosis before and after, on the held-out rows (without any, on the
    same rows). `resume` continues a killed run. Under torchrun every process must call this
    function: each processes a share of the text, and rank 0 writes.
    """
    inputs = _Inputs(sources, data, weights, check, experts)
    report: CalibrationReport = _repair_model(
        CALIBRATION, merged, out, settings, inputs, progress, keywords
    )
    return report


@with_keywords(RefitOutKeywords, RefitSettings, OutputSettings)
def refit(
    merged: ModelLike,
    out: str | Path,
    *,
    sources: Mapping[str, ModelLike],
    data: Mapping[str, Files],
    weights: Mapping[str, float] | None = None,
    check: Mapping[str, Files] | None = None,
    experts: Mapping[str, str | Path] | None = None,
    settings: RefitSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[RefitOutKeywords],
) -> RefitReport:
    """Refit the linear maps of `merged` to the outputs of its sources; write the model to `out`.

    Arguments are those of `calibrate`, with other settings:
    `refit(..., ridge=0.01, parts="attention,experts")`. Under torchrun every process must call this
    function: each processes a share of the text and fits a share of the experts, and rank 0 writes.
    """
    inputs = _Inputs(sources, data, weights, check, experts)
    report: RefitReport = _repair_model(REFIT, merged, out, settings, inputs, progress, keywords)
    return report


@with_keywords(DistillOutKeywords, DistillSettings, OutputSettings)
def distill(
    merged: ModelLike,
    out: str | Path,
    *,
    sources: Mapping[str, ModelLike],
    data: Mapping[str, Files],
    weights: Mapping[str, float] | None = None,
    check: Mapping[str, Files] | None = None,
    settings: DistillSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[DistillOutKeywords],
) -> DistillReport:
    """Train `merged` on the next-token distributions of its sources; write the model to `out`.

    Arguments are those of `calibrate`, with other settings:
    `distill(..., steps=60, learning_rate=1e-4, only="experts")`. Under torchrun every process must
    call this function: each trains on a share of the rows, and rank 0 writes.
    """
    inputs = _Inputs(sources, data, weights, check)
    report: DistillReport = _repair_model(
        DISTILLATION, merged, out, settings, inputs, progress, keywords
    )
    return report


def _repair_model(
    repair: Repair,
    merged: ModelLike,
    out: str | Path,
    settings: Any,
    inputs: _Inputs,
    progress: Progress | None,
    keywords: Mapping[str, Any],
) -> Any:
    """Run a repair as its Python function was called."""
    output, values = output_for(OutputSettings, keywords, repair.verb)
    settings = settings_for(repair.settings, settings, values, repair.verb)
    from moemerge.repairs.lockstep.request import RepairRequest

    request = RepairRequest(
        merged=merged,
        out=Path(out),
        sources=inputs.sources,
        data={name: files_of(files) for name, files in inputs.data.items()},
        settings=settings,
        weights=inputs.weights or {},
        check={name: files_of(files) for name, files in (inputs.check or {}).items()},
        experts=inputs.experts or {},
        overwrite=output.overwrite,
        resume=output.resume,
    )
    progress = Silent() if progress is None else progress
    target = output.push_to_hub if leads() else None
    with uploaded(request.out, target, progress):
        return run_repair(repair, request, progress, output.report)


def run_repair(
    repair: Repair,
    request: RepairRequest[Any],
    progress: Progress,
    page: str | Path | None,
    *,
    label: str | None = None,
    command: str | None = None,
) -> RepairReport:
    """Repair a model; then diagnose merge and result, if a page or the settings require it.

    On the page, `label` is the name of the merged model, and `command` the command that was run.
    """
    from moemerge.repairs.runners import load_runner

    run: Callable[[RepairRequest[Any], Progress], RepairReport] = load_runner(repair)
    settings = request.settings
    # A diagnosis compares models with the same experts, so pruning is not measured.
    measure = isinstance(settings, RepairSettings) and settings.measure
    measure = measure and (settings.holdout != 0 or bool(request.check))
    if request.check and not settings.measure:
        raise UsageError(
            "check text is given, but nothing is measured",
            hint="leave out `measure=False`, or the check text",
        )
    if page is None and not measure:
        return run(request, progress)
    from moemerge.diagnosis.page import BeforeAndAfter

    try:
        both = BeforeAndAfter.of(request, page if leads() else None, label=label, command=command)
    except (ArchitectureError, TokenizerError) as error:
        if page is not None or request.check:
            raise
        # Routers of a source can be read even if the source cannot be run.
        progress.note(f"the routing will not be measured on held-out rows: {error.message}")
        return run(request, progress)
    report = run(replace(request, text=both.text), progress)
    measured = both.holds_out or bool(request.check)
    if page is None and not measured:
        return report
    ranks = Ranks.join(resolve_device(request.settings.device))
    progress = ranks.progress(progress)
    try:
        diagnosis = _measured(both, progress, ranks)
    except MoeMergeError as error:
        if page is not None or request.check:
            raise
        progress.note(error.message)
        return report
    if diagnosis is None or not measure or not measured:
        return report
    figures = both.figures(diagnosis)
    if ranks.leads:
        _report_figures(report, figures, progress)
    return replace(report, diagnosis=figures)


def _report_figures(report: RepairReport, figures: Mapping[str, Any], progress: Progress) -> None:
    """Add the figures to OUT, and warn if a loss rose."""
    from moemerge.diagnosis.page import loss_notices
    from moemerge.repairs.lockstep.output_files import add_diagnosis

    for notice in loss_notices(figures):
        progress.note(notice)
    try:
        add_diagnosis(report, figures)
    except MoeMergeError as error:  # OUT is complete without it
        progress.note(f"{error.message}, so it lacks the figures measured on held-out rows")


def _measured(both: BeforeAndAfter, progress: Progress, ranks: Ranks) -> Diagnosis | None:
    """Diagnose with all ranks if each can read OUT and has a row of every domain.

    Otherwise rank 0 does it alone, and the other ranks return None.
    """
    ranks.barrier()  # rank 0 has written OUT by then
    domains = (*both.text.domains, *both.text.check)
    fewest = min(len(domain.holdout or domain.rows) for domain in domains)
    if ranks.all_agree(os.path.isdir(both.out) and fewest >= ranks.count):
        return both.measure(progress, ranks)
    return both.measure(progress, SINGLE) if ranks.leads else None
