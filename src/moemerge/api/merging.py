"""Merging: read a config, check it, merge, and repair the merge if the config requests it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from moemerge import merging
from moemerge.api.jobs import (
    check_recipes,
    files_of,
    make_texts,
    output_for,
    settings_for,
    uploaded,
)
from moemerge.api.repairs import run_repair
from moemerge.api.stages import check_config, staged
from moemerge.checkpoint import check_output
from moemerge.checkpoint.output import temporary_sibling
from moemerge.config.faults import parse_settings
from moemerge.config.fields import LayerSelection
from moemerge.config.job_settings import (
    CoefficientKeywords,
    CoefficientMethod,
    CoefficientSettings,
)
from moemerge.config.load import LoadedConfig
from moemerge.config.models import ModelRef
from moemerge.config.repair_settings import (
    CALIBRATION,
    DISTILLATION,
    PRUNE,
    REFIT,
    CalibrationKeywords,
    DistillKeywords,
    PruningKeywords,
    PruningSettings,
    RefitKeywords,
)
from moemerge.config.repairs import Repair, RepairSettings
from moemerge.config.requests import RequestedRepair
from moemerge.config.schema import REPAIRS
from moemerge.config.settings import (
    MergeKeywords,
    MergeSettings,
    OutputKeywords,
    OutputSettings,
    as_flags,
    plugin_flags,
    with_keywords,
)
from moemerge.config.text_settings import files_of as config_files
from moemerge.config.yaml_lines import read_document
from moemerge.errors import UsageError
from moemerge.merging.report import MergeReport
from moemerge.registry import did_you_mean
from moemerge.repairs.lockstep.models import check_sources
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.process import paused_collector
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.ranks import SINGLE, Ranks, alone, asked_for, leads, on_one_machine
from moemerge.text.rows import check_text

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.repairs.distilling.report import DistillReport
    from moemerge.repairs.harc_report import CalibrationReport
    from moemerge.repairs.lockstep.report import RepairReport
    from moemerge.repairs.pruning.run import PruneReport
    from moemerge.repairs.refitting.report import RefitReport
    from moemerge.statistics.coefficients.run import CoefficientsReport

ConfigSource = str | Path | Mapping[str, Any] | LoadedConfig
# How a page names a merge that exists only during `run`.
MERGE_ALONE = "the merge before its repair"
BEFORE_LAST = "the model before its last repair"


class RunKeywords(MergeKeywords, OutputKeywords, total=False):
    """Keywords of `run`: its settings, and settings of each repair that override the config's."""

    prune: PruningKeywords | None
    calibration: CalibrationKeywords | None
    refit: RefitKeywords | None
    distill: DistillKeywords | None


def load_config(source: ConfigSource, *, lenient: bool = False) -> LoadedConfig:
    """Read and check a config (a YAML path, or its content as a mapping)."""
    return _loaded(source, lenient=lenient)


def _loaded(source: ConfigSource, **options: bool) -> LoadedConfig:
    if isinstance(source, LoadedConfig):
        return source
    return check_config(read_document(source), **options)


@with_keywords(MergeKeywords, MergeSettings)
def merge(
    config: ConfigSource,
    out: str | Path,
    *,
    settings: MergeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[MergeKeywords],
) -> MergeReport:
    """Merge models into the folder `out`, which appears complete or not at all.

    Pass the settings as one object, or one by one: `merge(..., overwrite=True, device="cpu")`.
    Under torchrun every process must call this function: each merges some tensors, and rank 0
    renames the result to `out`.
    """
    settings = settings_for(MergeSettings, settings, keywords, "merge")
    progress = Silent() if progress is None else progress
    with staged(config, Path(out), settings, partial(_merge, progress=progress)) as last:
        loaded = last.merge_alone()
        with uploaded(Path(out), settings.push_to_hub if leads() else None, progress):
            return _merge(loaded, Path(out), settings, progress)


def _merge(
    loaded: LoadedConfig,
    out: Path,
    settings: MergeSettings,
    progress: Progress,
) -> MergeReport:
    """Merge. Statistics that are not saved are computed first, and removed afterwards."""
    on_one_machine("merge")
    # Plan before models are run for hours. Rank 0 checks OUT.
    job = merging.plan_merge(loaded, settings, out if leads() else None)
    if not all(os.path.exists(file) for file in loaded.texts):
        alone("generating the text that the config requests")
    make_texts(loaded, progress)
    ranks = SINGLE
    if asked_for() > 1:
        ranks = Ranks.join(resolve_device(settings.device))
    wanted = loaded.statistics
    if wanted is None or wanted.complete:
        return merging.run_merge(job, out, progress, ranks)
    from moemerge.statistics.collecting.run import computed_statistics

    models, device = loaded.merge.models, settings.device
    with computed_statistics(wanted, models, out, device, progress, ranks) as files:
        job = job.with_statistics(files)
        return merging.run_merge(job, out, progress, ranks)


@with_keywords(MergeKeywords, MergeSettings)
def validate(
    config: ConfigSource,
    out: str | Path | None = None,
    *,
    settings: MergeSettings | None = None,
    **keywords: Unpack[MergeKeywords],
) -> MergeReport:
    """Plan a merge (into `out`) and check all that can be checked without reading a tensor.

    Reads the first rows of each text file, and checks the sources and layers of the repair. Warns
    of text that nothing reads.
    """
    settings = settings_for(MergeSettings, settings, keywords, "validate")
    with staged(config, None if out is None else Path(out), settings) as loaded:
        if settings.push_to_hub is not None:
            from moemerge.checkpoint.hub import check_upload

            check_upload(settings.push_to_hub)
        _validate_repairs(loaded)
        check_recipes(loaded)
        loaded = replace(loaded, warnings=(*loaded.warnings, *loaded.unused_text))
        with paused_collector():
            return merging.plan_merge(loaded, settings, None if out is None else Path(out)).report


@dataclass(frozen=True)
class RunReport:
    """The reports of `run`: of the merge, and of the repairs that the config requests."""

    merge: MergeReport
    repairs: tuple[RepairReport, ...] = ()

    @property
    def repair(self) -> RepairReport | None:
        """The report of the last repair, or None if there was none."""
        return self.repairs[-1] if self.repairs else None

    @property
    def prune(self) -> PruneReport | None:
        """The report of pruning, or None if there was none."""
        return cast("PruneReport | None", self._of(PRUNE))

    @property
    def calibration(self) -> CalibrationReport | None:
        """The report of a calibration, or None if there was none."""
        return cast("CalibrationReport | None", self._of(CALIBRATION))

    @property
    def refit(self) -> RefitReport | None:
        """The report of a refit, or None if there was none."""
        return cast("RefitReport | None", self._of(REFIT))

    @property
    def distill(self) -> DistillReport | None:
        """The report of a distillation, or None if there was none."""
        return cast("DistillReport | None", self._of(DISTILLATION))

    def _of(self, repair: Repair) -> RepairReport | None:
        return next((report for report in self.repairs if report.repair is repair), None)

    def to_json(self) -> dict[str, Any]:
        own = {report.repair.key: report.to_json() for report in self.repairs}
        return {"merge": self.merge.to_json(), **own}


@with_keywords(RunKeywords, MergeSettings, OutputSettings)
def run(
    config: ConfigSource,
    out: str | Path,
    *,
    settings: MergeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[RunKeywords],
) -> RunReport:
    """Merge, then prune and repair as the config's `prune:`, `calibration:`, `refit:` and
    `distill:` blocks request, in this order, into `out`.

    The keywords of these names are settings that override those of the block. Models before the
    last repair exist only during the run. A resumed run makes them again and continues the last
    repair where it was stopped. `report` is an HTML page to write, as for `calibrate`: of the model
    before and after the last repair.
    """
    overrides = {r.key: cast(Mapping[str, Any], keywords.get(r.key) or {}) for r in REPAIRS}
    given = {name: value for name, value in keywords.items() if name not in overrides}
    output, values = output_for(OutputSettings, given, "run")
    if "overwrite" in given:
        values["overwrite"] = output.overwrite
    settings = settings_for(MergeSettings, settings, values, "run")
    progress = Silent() if progress is None else progress
    with staged(config, Path(out), settings, partial(_merge, progress=progress)) as loaded:
        return _run(config, loaded, Path(out), settings, output, overrides, progress)


def _run(
    config: ConfigSource,
    loaded: LoadedConfig,
    out: Path,
    settings: MergeSettings,
    output: OutputSettings,
    overrides: Mapping[str, Mapping[str, Any]],
    progress: Progress,
) -> RunReport:
    _refuse_unused(loaded.repairs, overrides, output.report)
    repo = output.push_to_hub or settings.push_to_hub
    if not loaded.repairs:
        with uploaded(out, repo, progress):
            return RunReport(_merge(loaded, out, settings, progress))
    changes = {one.repair.key: overrides[one.repair.key] for one in loaded.repairs}
    loaded = _with_settings(loaded, changes)
    check_output(out, overwrite=settings.overwrite)
    _validate_repairs(loaded)
    check_recipes(loaded)
    if output.report is not None:
        from moemerge.diagnosis.page import page_path

        page_path(output.report, (), overwrite=settings.overwrite)
    chosen = [name for name in MergeSettings.model_fields if name in settings.model_fields_set]
    flags = {name: value for own in changes.values() for name, value in own.items()}
    flags |= {name: getattr(settings, name) for name in chosen}
    command = _run_command(config, out, flags, output.report)
    with uploaded(out, repo, progress), temporary_sibling(out) as folder:
        model = folder / "merged"
        merged = _merge(loaded, model, settings, progress)
        from moemerge.repairs.lockstep.request import RepairRequest

        done: list[RepairReport] = []
        for requested in loaded.repairs:
            last = requested is loaded.repairs[-1]
            request = RepairRequest(
                merged=model,
                out=out if last else folder / requested.repair.key,
                sources=requested.sources,
                data=requested.data,
                settings=requested.settings,
                weights=requested.block.weights or {},
                experts=requested.block.experts or {},
                check=requested.check,
                overwrite=settings.overwrite,
                resume=output.resume and last,
                temporary=True,
                shown=loaded.shown,
            )
            page, label = output.report if last else None, MERGE_ALONE if not done else BEFORE_LAST
            words = {"label": label, "command": command}
            done.append(run_repair(requested.repair, request, progress, page, **words))
            model = request.out
    # The folders of the merge and of all repairs but the last are removed.
    repairs = tuple(replace(report, output=str(out)) for report in done)
    return RunReport(replace(merged, output=str(out)), repairs)


def _validate_repairs(loaded: LoadedConfig) -> None:
    """Check the text, sources and layers of the repairs before the merge is made."""
    for requested in loaded.repairs:
        columns = requested.settings.map
        check_text(loaded.existing(requested.data), columns=columns)
        check_text(requested.check, "check", columns)
        settings = requested.settings
        layers = settings.layers if isinstance(settings, RepairSettings) else LayerSelection()
        check_sources(requested.sources, layers, routers=requested.repair.needs_routers)
        if isinstance(settings, PruningSettings):
            _validate_pruning(requested.sources, settings)


def _validate_pruning(sources: Mapping[str, ModelRef], settings: PruningSettings) -> None:
    """Check how many experts would remain: a merge has as many as its sources."""
    alone("pruning")
    from moemerge.families.opened import open_model
    from moemerge.repairs.pruning.slicing import kept_count

    name, model = next(iter(sources.items()))
    kept_count(open_model(name, model), settings.keep)


def _refuse_unused(
    requested: Sequence[RequestedRepair],
    overrides: Mapping[str, Mapping[str, Any]],
    report: str | Path | None,
) -> None:
    """Refuse a page, and settings of a repair, if the config has no block that they apply to."""
    if report is not None and all(one.repair is PRUNE for one in requested):
        blocks = " or ".join(f"{repair.key}:" for repair in REPAIRS if repair is not PRUNE)
        raise UsageError(
            f"a report {report} is requested, but the config has no {blocks} block",
            hint="its sources and data are what routing is measured with; or use "
            "`moemerge diagnose` on the merged model",
        )
    own = {name for one in requested for name in one.repair.settings.model_fields}
    for key, values in overrides.items():
        unused = [n for n in values if n not in MergeSettings.model_fields and n not in own]
        if unused:
            raise UsageError(
                f"settings of a {key} are given ({', '.join(unused)}), but the config has no "
                f"{key}: block",
                hint="add the block (an empty one means defaults), or leave the settings out",
            )


def _with_settings(loaded: LoadedConfig, changes: Mapping[str, Mapping[str, Any]]) -> LoadedConfig:
    """Return the config with settings that override those of its repairs' blocks."""
    repairs = []
    for requested in loaded.repairs:
        repair, values = requested.repair, changes[requested.repair.key]
        if values:
            own = repair.overridden(requested.block, values)
            block = parse_settings(repair.block, own, f"{repair.key} settings")
            requested = replace(requested, block=block)
        repairs.append(requested)
    update = {one.repair.key: one.block for one in repairs}
    config = loaded.config.model_copy(update=update)
    return replace(loaded, repairs=tuple(repairs), config=config)


def _run_command(
    config: ConfigSource, out: Path, given: Mapping[str, Any], report: str | Path | None
) -> str:
    """Return the command line that repeats a run; CONFIG replaces a config that is not a file."""
    words = ["moemerge", "run", str(config) if isinstance(config, str | Path) else "CONFIG"]
    flags = ["--report", str(report), *as_flags(given), *plugin_flags()]
    return shlex.join([*words, str(out), *flags])


# --- coefficients ---------------------------------------------------------------------------------


@with_keywords(CoefficientKeywords, CoefficientSettings)
def find_coefficients(
    method: CoefficientMethod,
    config: ConfigSource,
    out: str | Path,
    *,
    data: Mapping[str, Files] | None = None,
    settings: CoefficientSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[CoefficientKeywords],
) -> CoefficientsReport:
    """Find how much of each model of `config` a merge should take, layer by layer, into `out`.

    `method` is `acm`, `sens`, `neuron`, `adamerging` or `expertmerging`. `data` is text of each
    merged model by name, and overrides the config's own `data`. A config with
    `coefficients: OUT` applies the result.
    """
    from moemerge.statistics.coefficients.job import CoefficientsRequest
    from moemerge.statistics.coefficients.run import MAKERS, run_coefficients

    if method not in MAKERS:
        raise UsageError(
            f"unknown way to find coefficients {method!r}{did_you_mean(method, MAKERS)}",
            hint=f"known: {', '.join(MAKERS)}",
        )
    chosen = settings_for(CoefficientSettings, settings, keywords, "find_coefficients")
    loaded = _loaded(config, coefficients=False)  # its file of them may not exist yet
    merge = loaded.merge
    if merge.base_model is None:
        raise UsageError(
            "the config has no base_model, which coefficients are found against",
            hint="name the model that the others were fine-tuned from: `base_model: ...`",
        )
    if not merge.whole:
        raise UsageError(
            "coefficients are found for whole models, and the config stacks slices",
            hint="list the models under `models:` in a config of its own",
        )
    merged = [m for m in merge.slices[0].inputs if m.model != merge.base_model]
    given = {name: files_of(files) for name, files in (data or {}).items()}
    unknown = [name for name in given if name not in {m.name for m in merged}]
    if unknown:
        known = [m.name for m in merged]
        raise UsageError(
            f"data {unknown[0]!r} belongs to no merged model{did_you_mean(unknown[0], known)}",
            hint=f"merged are {', '.join(known)}",
        )
    own = {name: config_files(text) for name, text in (loaded.config.data or {}).items()}
    request = CoefficientsRequest(
        method=method,
        models={m.name: m.model for m in merged},
        base=merge.base_model,
        data={**own, **given},
        out=Path(out),
        settings=chosen,
        overwrite=overwrite,
    )
    return run_coefficients(request, Silent() if progress is None else progress)
