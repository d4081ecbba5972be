"""Jobs that run models: calibrate, diagnose, swap routers, collect statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from moemerge.architectures.config_check import check_model_config
from moemerge.architectures.opened import open_model
from moemerge.config.calibration import CalibrationKeywords, CalibrationSettings
from moemerge.config.fields import LayerSelection, Strict
from moemerge.config.models import ModelRef
from moemerge.config.refit import RefitKeywords, RefitSettings
from moemerge.config.settings import (
    CollectingKeywords,
    CollectingSettings,
    DiagnosisKeywords,
    DiagnosisSettings,
    OutputKeywords,
    OutputSettings,
    with_keywords,
)
from moemerge.config.translate import parse_settings
from moemerge.errors import ArchitectureError, MoeMergeError, TokenizerError, UsageError
from moemerge.runtime import ranks
from moemerge.runtime.process import init_cuda_context
from moemerge.runtime.progress import Progress, Silent

if TYPE_CHECKING:
    from moemerge.calibration import CalibrationReport, CalibrationRequest
    from moemerge.collecting import CollectReport
    from moemerge.diagnosis import Diagnosis, SwapReport
    from moemerge.diagnosis.page import BeforeAndAfter
    from moemerge.merging.extract import ExtractReport
    from moemerge.refitting import RefitReport, RefitRequest
    from moemerge.text.rows import TextSource


S = TypeVar("S", bound=Strict)
Request = TypeVar("Request", "CalibrationRequest", "RefitRequest")
Report = TypeVar("Report", "CalibrationReport", "RefitReport")
Model = str | Path | ModelRef
if TYPE_CHECKING:
    Files = str | Path | Sequence[TextSource]  # files, or rows in memory


class CalibrateKeywords(CalibrationKeywords, OutputKeywords, total=False):
    """Keywords of `calibrate`."""


class RefitOutKeywords(RefitKeywords, OutputKeywords, total=False):
    """Keywords of `refit`."""


def settings_for(model: type[S], settings: S | None, values: Mapping[str, Any], job: str) -> S:
    """Settings given as a whole, or made of single values."""
    if settings is None:
        return parse_settings(model, values, f"settings of {job}")
    if values:
        raise UsageError(
            f"{job}: settings were given as a whole and also one by one: {', '.join(values)}",
            hint="give either `settings` or single values",
        )
    return settings


def output_for(model: type[S], keywords: Mapping[str, Any], job: str) -> tuple[S, dict[str, Any]]:
    """The keywords that say how an output is written, as settings, and the others."""
    values = {n: v for n, v in keywords.items() if n in model.model_fields}
    others = {n: v for n, v in keywords.items() if n not in values}
    return parse_settings(model, values, f"settings of {job}"), others


@with_keywords(CalibrateKeywords, CalibrationSettings, OutputSettings)
def calibrate(
    merged: Model,
    out: str | Path,
    *,
    sources: Mapping[str, Model],
    data: Mapping[str, Files],
    weights: Mapping[str, float] | None = None,
    settings: CalibrationSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[CalibrateKeywords],
) -> CalibrationReport:
    """Solve for the routers of `merged` and write the calibrated model to `out`.

    `sources` are the merged models and `data` their text (JSON lines or parquet), under the same
    names; `weights` say how much each counts (1 where none is given). Settings are given as a
    whole, or one by one: `calibrate(..., alpha=0.5, layers="8-15")`. `report` is an HTML page to
    write: a diagnosis before and after, on the rows held out (on the same rows, where none are).
    `resume` goes on where a killed run ended. Under torchrun every process must call it: each runs
    a share of the text, and rank 0 writes.
    """
    output, values = output_for(OutputSettings, keywords, "calibrate")
    settings = settings_for(CalibrationSettings, settings, values, "calibrate")
    init_cuda_context(settings.device)
    from moemerge.calibration import CalibrationRequest, run_calibration

    request = CalibrationRequest(
        merged=merged,
        out=Path(out),
        sources=sources,
        data={name: files_of(files) for name, files in data.items()},
        settings=settings,
        weights=weights or {},
        overwrite=output.overwrite,
        resume=output.resume,
    )
    progress = Silent() if progress is None else progress
    target = output.push_to_hub if ranks.leads() else None
    with uploaded(request.out, target, progress):
        return repair(run_calibration, request, progress, output.report)


@with_keywords(RefitOutKeywords, RefitSettings, OutputSettings)
def refit(
    merged: Model,
    out: str | Path,
    *,
    sources: Mapping[str, Model],
    data: Mapping[str, Files],
    weights: Mapping[str, float] | None = None,
    settings: RefitSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[RefitOutKeywords],
) -> RefitReport:
    """Refit the linear maps of `merged` to what its sources give, and write the model to `out`.

    `sources` are the merged models and `data` their text (JSON lines or parquet), under the same
    names; `weights` say how much each counts (1 where none is given). Settings are given as a
    whole, or one by one: `refit(..., ridge=0.01, parts="attention,experts")`. `report` is an HTML
    page to write: a diagnosis before and after. `resume` goes on where a killed run ended. Under
    torchrun every process must call it: each runs a share of the text and fits a share of the
    experts, and rank 0 writes.
    """
    output, values = output_for(OutputSettings, keywords, "refit")
    settings = settings_for(RefitSettings, settings, values, "refit")
    init_cuda_context(settings.device)
    from moemerge.refitting import RefitRequest, run_refit

    request = RefitRequest(
        merged=merged,
        out=Path(out),
        sources=sources,
        data={name: files_of(files) for name, files in data.items()},
        settings=settings,
        weights=weights or {},
        overwrite=output.overwrite,
        resume=output.resume,
    )
    progress = Silent() if progress is None else progress
    target = output.push_to_hub if ranks.leads() else None
    with uploaded(request.out, target, progress):
        return repair(run_refit, request, progress, output.report)


def files_of(files: Files) -> tuple[TextSource, ...]:
    return (files,) if isinstance(files, str | Path) else tuple(files)


def repair(
    run: Callable[[Request, Progress], Report],
    request: Request,
    progress: Progress,
    page: str | Path | None,
    *,
    label: str | None = None,
    command: str | None = None,
) -> Report:
    """Calibrate or refit; then diagnose merge and result, where there is a page to write or where
    rows were held out and settings want it.

    On the page `label` is what the merged model is called, and `command` what was called.
    """
    measure = getattr(request.settings, "measure", False) and request.settings.holdout != 0
    if page is None and not measure:
        return run(request, progress)
    try:
        shown = page if ranks.leads() else None
        both = _before_and_after(request, shown, label, command)
    except (ArchitectureError, TokenizerError) as error:
        if page is not None:
            raise
        # Sources that cannot be run have routers all the same.
        progress.note(f"the routing will not be measured on held-out rows: {error.message}")
        return run(request, progress)
    report = run(replace(request, text=both.text), progress)
    if page is None and not both.holds_out:
        return report
    try:
        diagnosis = _measured(both, ranks.progress_of_lead(progress))
    except MoeMergeError as error:
        if page is not None:
            raise
        ranks.progress_of_lead(progress).note(error.message)
        return report
    if diagnosis is None or not measure or not both.holds_out:
        return report
    from moemerge.diagnosis.page import loss_notices
    from moemerge.lockstep.repairs import add_diagnosis

    figures = both.figures(diagnosis)
    for notice in loss_notices(figures):
        ranks.progress_of_lead(progress).note(notice)
    try:
        add_diagnosis(report, figures)
    except MoeMergeError as error:  # OUT is whole without it
        progress.note(f"{error.message}, so it does not tell what was measured on rows held out")
    return replace(report, diagnosis=figures)


def _measured(both: BeforeAndAfter, progress: Progress) -> Diagnosis | None:
    """By all ranks where each sees OUT and has a row of every domain; else by rank 0, and None in
    the others."""
    ranks.from_lead(None)  # rank 0 has written OUT by then
    fewest = min(len(domain.holdout or domain.rows) for domain in both.text.domains)
    if ranks.all_say(both.out.is_dir() and fewest >= ranks.count()):
        return both.measure(progress)
    if not ranks.leads():
        return None
    with ranks.apart():
        return both.measure(progress)


def _before_and_after(
    request: CalibrationRequest | RefitRequest,
    page: str | Path | None,
    label: str | None,
    command: str | None,
) -> BeforeAndAfter:
    from moemerge.diagnosis.page import BeforeAndAfter

    values = request.settings
    settings = {name: getattr(values, name) for name in type(values).model_fields}
    models = (request.merged, request.out)
    return BeforeAndAfter.of(
        page, models, request.sources, request.data, settings, label=label, command=command
    )


@with_keywords(DiagnosisKeywords, DiagnosisSettings)
def diagnose(
    model: Model,
    *,
    sources: Mapping[str, Model],
    data: Mapping[str, Files],
    against: Sequence[Model] = (),
    settings: DiagnosisSettings | None = None,
    report: str | Path | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[DiagnosisKeywords],
) -> Diagnosis:
    """Measure what a merge did to the routing of `model`, whoever merged it.

    `sources` are the merged models and `data` text of each (best held out from any calibration),
    under the same names; text under any other name is measured against the `base`: what was lost
    there, no source speaks for. Models in `against` are measured, too. Settings are given as
    a whole, or one by one: `diagnose(..., swaps=True, max_tokens=20_000)`. `report` is an HTML
    page to write.
    """
    from moemerge.diagnosis import DiagnosisRequest, run_diagnosis
    from moemerge.diagnosis.page import page_path
    from moemerge.report.page import write_page

    request = DiagnosisRequest(
        model=model,
        sources=sources,
        data={name: files_of(files) for name, files in data.items()},
        against=(against,) if isinstance(against, str | Path | ModelRef) else tuple(against),
        settings=settings_for(DiagnosisSettings, settings, keywords, "diagnose"),
    )
    page = None if report is None or not ranks.leads() else page_path(report)
    diagnosis = run_diagnosis(request, Silent() if progress is None else progress)
    if page is not None:
        write_page(diagnosis.to_json(), page)
    return diagnosis


def swap_routers(
    model: Model,
    donor: Model,
    out: str | Path,
    *,
    layers: object = "all",
    link: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SwapReport:
    """Write `model` with the routers of `donor` (of the same family) to `out`.

    `link` makes hard links of the shards that hold no router, where the disk allows it.
    """
    from moemerge.diagnosis import swap_routers as swap

    check_model_config(open_model(str(model), model))
    return swap(
        model,
        donor,
        Path(out),
        layers=LayerSelection.parse(layers),
        link=link,
        overwrite=overwrite,
        progress=Silent() if progress is None else progress,
    )


def extract(
    shared: Model,
    task: str,
    out: str | Path,
    *,
    base: Model | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExtractReport:
    """Write one model of a merge that kept them (`tasks:` in its config) to `out`; `task` names it.

    `base` is where the base model is now, if it is not where the merge found it.
    """
    from moemerge.merging.extract import extract_model

    progress = Silent() if progress is None else progress
    check_model_config(open_model(str(shared), shared))
    return extract_model(shared, task, Path(out), base=base, overwrite=overwrite, progress=progress)


@with_keywords(CollectingKeywords, CollectingSettings)
def collect_statistics(
    model: Model,
    out: str | Path,
    *,
    data: Files,
    settings: CollectingSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[CollectingKeywords],
) -> CollectReport:
    """Gather Grams or Fisher values of `model` over its text `data` into the file `out`.

    Settings are given as a whole, or one by one: `collect_statistics(..., kind="fisher")`.
    """
    from moemerge.collecting import CollectRequest, run_collect

    request = CollectRequest(
        model=model,
        out=Path(out),
        data=files_of(data),
        settings=settings_for(CollectingSettings, settings, keywords, "collect_statistics"),
        overwrite=overwrite,
    )
    return run_collect(request, Silent() if progress is None else progress)


@contextmanager
def uploaded(out: Path, repo: str | None, progress: Progress) -> Iterator[None]:
    """Upload what the block has written to `out`; whether that can be done is asked before."""
    if repo is None:
        yield
        return
    from moemerge.checkpoint.hub import check_upload, upload

    check_upload(repo)
    yield
    progress.note(f"uploading {out} to {repo}")
    progress.note(f"uploaded: {upload(out, repo)}")
