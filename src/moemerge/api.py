"""The Python interface: a function for every verb.

A function checks its arguments before it works. Settings are one object
(`settings=CalibrationSettings(alpha=0.5)`) or keywords (`alpha=0.5`). A package that imports torch
is imported when it is used.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from moemerge.checkpoint import Checkpoint, check_output
from moemerge.checkpoint.locate import is_hub_id, is_local, locate
from moemerge.checkpoint.output import temporary_folder, temporary_sibling
from moemerge.config.checks import body_prefix
from moemerge.config.dump import config_data
from moemerge.config.dump import config_schema as schema_of
from moemerge.config.faults import Fault, parse_settings
from moemerge.config.faults import Path as FaultPath
from moemerge.config.fields import LayerSelection
from moemerge.config.job_settings import (
    CoefficientMethod,
    CoefficientSettings,
    CollectingSettings,
    ComposeSettings,
    DiagnosisSettings,
    ExpertLayoutName,
    ExtractLoraSettings,
)
from moemerge.config.load import EarlierStages, LoadedConfig, check_document
from moemerge.config.models import ModelLike, ModelRef
from moemerge.config.parameters import REQUIRED, BasePolicy, MethodSchema, WrapperSchema
from moemerge.config.repair_settings import (
    CALIBRATION,
    DISTILLATION,
    PRUNE,
    REFIT,
    CalibrationSettings,
    DistillSettings,
    PruneSettings,
    PruningSettings,
    RefitSettings,
)
from moemerge.config.repairs import Repair, RepairSettings, StepSettings, check_names
from moemerge.config.requests import TextRequest
from moemerge.config.resolve import entries
from moemerge.config.schema import REPAIRS, RunConfig
from moemerge.config.settings import (
    MergeSettings,
    OutputSettings,
    as_flags,
    output_for,
    plugin_flags,
    settings_for,
    with_keywords,
)
from moemerge.config.stages import Stage, read_stages
from moemerge.config.text_settings import DataRecipe
from moemerge.config.text_settings import files_of as config_files
from moemerge.config.yaml_lines import Document, read_document
from moemerge.errors import ArchitectureError, MoeMergeError, TokenizerError, UsageError
from moemerge.families.describe import Description, describe
from moemerge.families.families import families
from moemerge.families.opened import open_model
from moemerge.registry import add_plugin, did_you_mean
from moemerge.runtime.checksums import Verification, verify_checksums
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.process import paused_collector
from moemerge.runtime.progress import Progress, Silent, counted
from moemerge.runtime.ranks import SINGLE, Ranks, alone, asked_for, leads, on_one_machine
from moemerge.text.rows import TextSource, check_file, check_text

if TYPE_CHECKING:
    from moemerge.conversion.compose import ComposeReport
    from moemerge.conversion.convert import ConvertReport
    from moemerge.conversion.extract_lora import ExtractLoraReport
    from moemerge.diagnosis.results import Diagnosis
    from moemerge.diagnosis.swap import SwapReport
    from moemerge.merging.extract import ExtractReport
    from moemerge.merging.report import MergeReport
    from moemerge.repairs.distill_report import DistillReport
    from moemerge.repairs.harc_report import CalibrationReport
    from moemerge.repairs.inputs import RepairRequest
    from moemerge.repairs.refit_report import RefitReport
    from moemerge.repairs.report import RepairReport
    from moemerge.statistics.coefficients.run import CoefficientsReport
    from moemerge.statistics.collecting.run import CollectReport

Files = str | Path | Sequence[TextSource]  # files, or rows in memory
ConfigSource = str | Path | Mapping[str, Any] | LoadedConfig


def files_of(files: Files) -> tuple[TextSource, ...]:
    """Return one file as a tuple, and several unchanged."""
    return (files,) if isinstance(files, str | Path) else tuple(files)


def _by_name(texts: Mapping[str, Files] | None) -> dict[str, tuple[TextSource, ...]]:
    return {name: files_of(files) for name, files in (texts or {}).items()}


@contextmanager
def uploaded(out: Path, repo: str | None, progress: Progress) -> Iterator[None]:
    """Upload the content of `out` after the block, and check the permission before it."""
    if repo is None:
        yield
        return
    from moemerge.checkpoint.hub import check_upload, upload

    check_upload(repo)
    yield
    progress.note(f"uploading {out} to {repo}")
    progress.note(f"uploaded: {upload(out, repo)}")


# --- configs --------------------------------------------------------------------------------------


def load_config(source: ConfigSource, *, lenient: bool = False) -> LoadedConfig:
    """Read and check a config (a YAML path, or its content as a mapping)."""
    if isinstance(source, LoadedConfig):
        return source
    return check_config(read_document(source), lenient=lenient)


def check_config(
    document: Document, *, lenient: bool | None = None, **options: Any
) -> LoadedConfig:
    """Check a config that has been read, for all methods and wrappers.

    `lenient` is None if the caller does not have this setting. Other options are those of
    `check_document`.
    """
    document = replace(document, lenient=lenient)
    return check_document(document, schemas=method_schemas(), wrappers=wrapper_schemas(), **options)


def missing_inputs(config: RunConfig) -> list[Fault]:
    """Return a fault for each local model and file of text that a config names and that is absent.

    Uses no network.
    """
    found: dict[str, Fault] = {}

    def check(place: FaultPath, name: str, use: Callable[[], object]) -> None:
        try:
            use()
        except MoeMergeError as error:
            found.setdefault(name, Fault(place, error.message))

    def check_model(place: FaultPath, ref: ModelRef) -> None:
        for path, revision in ((ref.path, ref.revision), (ref.lora, ref.lora_revision)):
            if path is not None and not is_hub_id(path):
                check(place, path, partial(locate, path, revision))

    prefix = body_prefix(config)
    if config.base_model is not None:
        check_model(("base_model",), config.base_model)
    for place, entry in entries(config.body):
        check_model((*prefix, *place, "model"), entry.model)
    for i, merge_slice in enumerate(config.body.slices or ()):
        if merge_slice.base_model is not None:
            check_model((*prefix, "slices", i, "base_model"), merge_slice.base_model)
    texts: dict[FaultPath, Any] = {}
    if any(block.data is None for block in config.repairs.values()):
        texts |= {("data", name): text for name, text in (config.data or {}).items()}
    for repair, block in config.repairs.items():
        listed = block.sources if isinstance(block.sources, tuple) else (block.sources or {},)
        for i, named in enumerate(listed):
            step = (i,) if isinstance(block.sources, tuple) else ()
            for name, ref in named.items() if isinstance(named, Mapping) else ():
                check_model((repair.key, "sources", *step, name), ref)
        texts |= {(repair.key, "data", name): text for name, text in (block.data or {}).items()}
        texts |= {(repair.key, "check", name): text for name, text in (block.check or {}).items()}
    made = {text.file for text in texts.values() if isinstance(text, DataRecipe)}
    for where, text in texts.items():
        files = [] if isinstance(text, DataRecipe) else [file for file in text if file not in made]
        if isinstance(text, DataRecipe) and not os.path.exists(text.file):
            files = [f for f in (*text.prompts, *text.text, *text.against) if is_local(f)]
        for file in files:
            check(where, file, partial(check_file, Path(file)))
    return list(found.values())


@contextmanager
def staged(
    config: ConfigSource,
    out: Path | None,
    settings: MergeSettings,
    merge: Callable[[LoadedConfig, Path], object] | None = None,
) -> Iterator[LoadedConfig]:
    """Yield the last merge of a config; the models of earlier ones exist inside the block.

    `merge` makes them. Without it they are placeholders without weights, which suffice to plan
    with. All merges are planned in this way before the first is made.
    """
    if isinstance(config, LoadedConfig):
        yield config
        return
    stages = read_stages(config)
    if len(stages) == 1:
        document = stages[0].document
        yield check_config(document, lenient=settings.lenient, inputs=missing_inputs)
        return
    from moemerge import merging

    def placeholder(loaded: LoadedConfig, folder: Path) -> None:
        merging.write_placeholder(merging.plan_merge(loaded, settings), folder)

    alone("a config of several merges")
    if out is not None:
        check_output(out, overwrite=settings.overwrite)
    with temporary_folder("moemerge-validate-", None) as folder:
        last = _run_stages(stages, Path(folder), settings, placeholder)
        if merge is None or out is None:
            yield last
            return
        merging.plan_merge(last, settings, out)
    with temporary_sibling(out) as place:
        yield _run_stages(stages, place, settings, merge)


def _run_stages(
    stages: Sequence[Stage],
    folder: Path,
    settings: MergeSettings,
    merge: Callable[[LoadedConfig, Path], object],
) -> LoadedConfig:
    """Merge all stages but the last into `folder`, and return the last."""
    earlier = EarlierStages(f"{folder.resolve()}{os.sep}", ())
    for i, stage in enumerate(stages):
        document = stage.placed({name: earlier.prefix + name for name in stage.uses})
        loaded = check_config(document, lenient=settings.lenient, inputs=missing_inputs)
        loaded = replace(loaded, earlier=earlier)
        if i == len(stages) - 1:
            break
        if loaded.repairs:
            raise UsageError(
                f"the merge {stage.name!r} has a `{loaded.repairs[0].repair.key}:` block, and only "
                "the last merge of a file is repaired",
                hint="repair it by a file of its own, and name the result as a model",
            )
        merge(loaded, folder / stage.name)
        for name in stage.uses - {used for later in stages[i + 1 :] for used in later.uses}:
            shutil.rmtree(folder / name)  # no later merge reads it
        seed = loaded.config.seed if settings.seed is None else settings.seed
        config = loaded.config.model_copy(update={"seed": seed or 0})
        earlier = replace(earlier, configs=(*earlier.configs, (stage.name, config)))
    return loaded


# --- merging --------------------------------------------------------------------------------------


@with_keywords(MergeSettings)
def merge(
    config: ConfigSource,
    out: str | Path,
    *,
    settings: MergeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> MergeReport:
    """Merge models into the folder `out`, which appears complete or not at all.

    Under torchrun every process must call this function: each merges some tensors, and rank 0
    renames the result to `out`.
    """
    options = settings_for(MergeSettings, settings, keywords, "merge")
    bar, folder = progress or Silent(), Path(out)

    def run_merge(loaded: LoadedConfig, place: Path) -> MergeReport:
        return _merge(loaded, place, options, bar)

    with staged(config, folder, options, run_merge) as last:
        loaded = last.merge_alone()
        with uploaded(folder, options.push_to_hub if leads() else None, bar):
            return run_merge(loaded, folder)


def _merge(
    loaded: LoadedConfig, out: Path, settings: MergeSettings, progress: Progress
) -> MergeReport:
    """Merge. Statistics that are not saved are computed first, and removed afterwards."""
    from moemerge import merging

    on_one_machine("merge")
    # Plan before models are run for hours. Rank 0 checks OUT.
    job = merging.plan_merge(loaded, settings, out if leads() else None)
    for file, wanted in loaded.texts.items():
        if os.path.exists(file):
            progress.note(f"{file} exists and is used unchanged; remove it to generate it again")
            continue
        alone("generating the text that the config requests")
        report = _make_text(wanted, progress=progress)
        progress.note(f"{file}: {counted(report.kept, 'row')} of text, made by {wanted.model}")
    ranks = Ranks.join(resolve_device(settings.device)) if asked_for() > 1 else SINGLE
    wanted_statistics = loaded.statistics
    if wanted_statistics is None or wanted_statistics.complete:
        return merging.run_merge(job, out, progress, ranks)
    from moemerge.statistics.collecting.run import computed_statistics

    models = loaded.merge.models
    with computed_statistics(
        wanted_statistics, models, out, settings.device, progress, ranks
    ) as files:
        return merging.run_merge(job.with_statistics(files), out, progress, ranks)


def _make_text(wanted: TextRequest, **options: Any) -> Any:
    """Generate text by `moemerge.make_data`. It is the laboratory's, which this module does not
    import."""
    recipe = wanted.recipe
    return importlib.import_module("moemerge").make_data(
        wanted.model,
        recipe.file,
        prompts=recipe.prompts,
        text=recipe.text,
        settings=recipe.settings,
        **options,
    )


@with_keywords(MergeSettings)
def validate(
    config: ConfigSource,
    out: str | Path | None = None,
    *,
    settings: MergeSettings | None = None,
    **keywords: Any,
) -> MergeReport:
    """Plan a merge (into `out`) and check all that can be checked without reading a tensor.

    Reads the first rows of each text file, and checks the sources and layers of the repair. Warns
    of text that nothing reads.
    """
    from moemerge import merging

    settings = settings_for(MergeSettings, settings, keywords, "validate")
    folder = None if out is None else Path(out)
    with staged(config, folder, settings) as loaded:
        if settings.push_to_hub is not None:
            from moemerge.checkpoint.hub import check_upload

            check_upload(settings.push_to_hub)
        _validate_repairs(loaded)
        loaded = replace(loaded, warnings=(*loaded.warnings, *loaded.unused_text))
        with paused_collector():
            job = merging.plan_merge(loaded, settings, folder)
        made = json.loads(job.files.made["config.json"])
        if not settings.lenient and "quantization_config" not in made:
            from moemerge.forward.known_configs import check_loadable

            tensors = {info.name: info for info in job.plan.tensors}
            check_loadable(made, tensors, "config.json of the merged model")
        return job.report


def _validate_repairs(loaded: LoadedConfig) -> None:
    """Check the text, sources and layers of the repairs before the merge is made."""
    for file, wanted in loaded.texts.items():
        if not os.path.exists(file):
            _make_text(wanted, dry_run=True)
    if not loaded.repairs:
        return
    from moemerge.repairs.routers import check_sources

    for requested in loaded.repairs:
        settings = requested.settings
        check_text(loaded.existing(requested.data), columns=settings.map)
        check_text(requested.check, "check", settings.map)
        layers = settings.layers if isinstance(settings, RepairSettings) else LayerSelection()
        check_sources(requested.sources, layers, routers=requested.repair.needs_routers)
        if isinstance(settings, PruningSettings):
            alone("pruning")
            from moemerge.repairs.slicing import kept_count

            name, model = next(iter(requested.sources.items()))  # a merge has as many experts
            kept_count(open_model(name, model), settings.keep)


@dataclass(frozen=True)
class RunReport:
    """The reports of `run`: of the merge, and of the repairs that the config requests."""

    merge: MergeReport
    repairs: tuple[RepairReport, ...] = ()

    @property
    def repair(self) -> RepairReport | None:
        """The report of the last repair, or None if there was none."""
        return self.repairs[-1] if self.repairs else None

    def __getattr__(self, key: str) -> Any:
        """Return the report of `prune`, `calibration`, `refit` or `distill`, or None."""
        if key not in {repair.key for repair in REPAIRS}:
            raise AttributeError(key)
        return next((report for report in self.repairs if report.repair.key == key), None)

    def to_json(self) -> dict[str, Any]:
        own = {report.repair.key: report.to_json() for report in self.repairs}
        return {"merge": self.merge.to_json(), **own}


@with_keywords(MergeSettings, OutputSettings)
def run(
    config: ConfigSource,
    out: str | Path,
    *,
    prune: Mapping[str, Any] | None = None,
    calibration: Mapping[str, Any] | None = None,
    refit: Mapping[str, Any] | None = None,
    distill: Mapping[str, Any] | None = None,
    settings: MergeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> RunReport:
    """Merge, then prune and repair as the config's `prune:`, `calibration:`, `refit:` and
    `distill:` blocks request, in this order, into `out`.

    The keywords of these names are settings that override those of the block. Models before the
    last repair exist only during the run. A resumed run makes them again and continues the last
    repair where it was stopped. `report` is an HTML page to write, as for `calibrate`: of the model
    before and after the last repair.
    """
    given = {"prune": prune, "calibration": calibration, "refit": refit, "distill": distill}
    overrides: dict[str, Mapping[str, Any]] = {key: one or {} for key, one in given.items()}
    output, values = output_for(OutputSettings, keywords, "run")
    if "overwrite" in keywords:
        values["overwrite"] = output.overwrite
    options = settings_for(MergeSettings, settings, values, "run")
    bar, folder = progress or Silent(), Path(out)

    def run_merge(loaded: LoadedConfig, place: Path) -> MergeReport:
        return _merge(loaded, place, options, bar)

    with staged(config, folder, options, run_merge) as loaded:
        _refuse_unused(loaded, overrides, output.report)
        repo = output.push_to_hub or options.push_to_hub
        if not loaded.repairs:
            with uploaded(folder, repo, bar):
                return RunReport(run_merge(loaded, folder))
        loaded = _with_settings(loaded, overrides)
        check_output(folder, overwrite=options.overwrite)
        _validate_repairs(loaded)
        if output.report is not None:
            from moemerge.diagnosis.page import page_path

            page_path(output.report, (), overwrite=options.overwrite)
        flags = {n: v for one in loaded.repairs for n, v in overrides[one.repair.key].items()}
        flags |= {name: getattr(options, name) for name in options.model_fields_set}
        name = str(config) if isinstance(config, str | Path) else "CONFIG"
        words = ["moemerge", "run", name, str(out), "--report", str(output.report)]
        command = shlex.join([*words, *as_flags(flags), *plugin_flags()])
        with uploaded(folder, repo, bar), temporary_sibling(folder) as place:
            from moemerge.repairs.inputs import RepairRequest

            model = place / "merged"
            merged = run_merge(loaded, model)
            done: list[RepairReport] = []
            for requested in loaded.repairs:
                last = requested is loaded.repairs[-1]
                request: RepairRequest[Any] = RepairRequest(
                    merged=model,
                    out=folder if last else place / requested.repair.key,
                    sources=requested.sources,
                    data=requested.data,
                    settings=requested.settings,
                    weights=requested.block.weights or {},
                    experts=requested.block.experts or {},
                    check=requested.check,
                    overwrite=options.overwrite,
                    resume=output.resume and last,
                    temporary=True,
                    shown=loaded.shown,
                )
                page = output.report if last else None
                which = "model before its last" if done else "merge before its"
                report = run_repair(
                    requested.repair,
                    request,
                    bar,
                    page,
                    label=f"the {which} repair",
                    command=command,
                )
                done.append(report)
                model = request.out
        # The folders of the merge and of all repairs but the last are removed.
        repairs = tuple(replace(report, output=str(out)) for report in done)
        return RunReport(replace(merged, output=str(out)), repairs)


def _refuse_unused(
    loaded: LoadedConfig, overrides: Mapping[str, Mapping[str, Any]], report: Path | None
) -> None:
    """Refuse a page, and settings of a repair, if the config has no block that they apply to."""
    requested = [one.repair for one in loaded.repairs]
    if report is not None and all(repair is PRUNE for repair in requested):
        blocks = " or ".join(f"{repair.key}:" for repair in REPAIRS if repair is not PRUNE)
        raise UsageError(
            f"a report {report} is requested, but the config has no {blocks} block",
            hint="its sources and data are what routing is measured with; or use "
            "`moemerge diagnose` on the merged model",
        )
    own = {name for repair in requested for name in repair.settings.model_fields}
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


# --- repairs --------------------------------------------------------------------------------------


@with_keywords(CalibrationSettings, OutputSettings)
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
    **keywords: Any,
) -> CalibrationReport:
    """Solve for the routers of `merged` and write the calibrated model to `out`.

    `sources` are the merged models and `data` their text (JSON lines or parquet), under the same
    names. `weights` set how much each counts (default: 1). `check` is text that is only measured,
    before and after. `experts` are JSON files with the kept experts of sources that have more
    experts than `merged`, if neither a report of moemerge nor equal router rows show them.
    `report` is an HTML page to write: a diagnosis before and after, on the held-out rows (without
    any, on the same rows). `resume` continues a killed run. Under torchrun every process must call
    this function: each processes a share of the text, and rank 0 writes.
    """
    inputs = {"weights": weights, "check": check, "experts": experts}
    report: CalibrationReport = _repair(
        CALIBRATION, merged, out, sources, data, inputs, settings, progress, keywords
    )
    return report


@with_keywords(RefitSettings, OutputSettings)
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
    **keywords: Any,
) -> RefitReport:
    """Refit the linear maps of `merged` to the outputs of its sources; write the model to `out`.

    Arguments are those of `calibrate`, with other settings:
    `refit(..., ridge=0.01, parts="attention,experts")`. Under torchrun every process must call this
    function: each processes a share of the text and fits a share of the experts, and rank 0 writes.
    """
    inputs = {"weights": weights, "check": check, "experts": experts}
    report: RefitReport = _repair(
        REFIT, merged, out, sources, data, inputs, settings, progress, keywords
    )
    return report


@with_keywords(DistillSettings, OutputSettings)
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
    **keywords: Any,
) -> DistillReport:
    """Train `merged` on the next-token distributions of its sources; write the model to `out`.

    Arguments are those of `calibrate`, with other settings:
    `distill(..., steps=60, learning_rate=1e-4, only="experts")`. Under torchrun every process must
    call this function: each trains on a share of the rows, and rank 0 writes.
    """
    inputs = {"weights": weights, "check": check}
    report: DistillReport = _repair(
        DISTILLATION, merged, out, sources, data, inputs, settings, progress, keywords
    )
    return report


def _repair(
    repair: Repair,
    merged: ModelLike,
    out: str | Path,
    sources: Mapping[str, ModelLike],
    data: Mapping[str, Files],
    inputs: Mapping[str, Mapping[str, Any] | None],
    settings: Any,
    progress: Progress | None,
    keywords: Mapping[str, Any],
) -> Any:
    """Run a repair as its Python function was called."""
    output, values = output_for(OutputSettings, keywords, repair.verb)
    settings = settings_for(repair.settings, settings, values, repair.verb)
    check_names(sources, data)
    from moemerge.repairs.inputs import RepairRequest

    request: RepairRequest[Any] = RepairRequest(
        merged=merged,
        out=Path(out),
        sources=sources,
        data=_by_name(data),
        settings=settings,
        weights=inputs["weights"] or {},
        check=_by_name(inputs["check"]),
        experts=inputs.get("experts") or {},
        overwrite=output.overwrite,
        resume=output.resume,
    )
    progress = progress or Silent()
    with uploaded(request.out, output.push_to_hub if leads() else None, progress):
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

    run_one: Callable[[RepairRequest[Any], Progress], RepairReport] = load_runner(repair)
    settings = request.settings
    # A diagnosis compares models with the same experts, so pruning is not measured.
    measure = isinstance(settings, RepairSettings) and settings.measure
    measure = measure and (settings.holdout != 0 or bool(request.check))
    if request.check and not settings.measure:
        raise UsageError(
            "check text is given, but nothing is measured",
            hint="leave out --no-measure (`measure=False`), or the check text",
        )
    if page is None and not measure:
        return run_one(request, progress)
    from moemerge.diagnosis.page import BeforeAndAfter, loss_notices

    try:
        both = BeforeAndAfter.of(request, page if leads() else None, label=label, command=command)
    except (ArchitectureError, TokenizerError) as error:
        if page is not None or request.check:
            raise
        # Routers of a source can be read even if the source cannot be run.
        progress.note(f"the routing will not be measured on held-out rows: {error.message}")
        return run_one(request, progress)
    report = run_one(replace(request, text=both.text), progress)
    measured = both.holds_out or bool(request.check)
    if page is None and not measured:
        return report
    ranks = Ranks.join(resolve_device(request.settings.device))
    progress = ranks.progress(progress)
    # All ranks measure if each can read OUT and has a row of every domain; otherwise rank 0 does.
    ranks.barrier()  # rank 0 has written OUT by then
    domains = (*both.text.domains, *both.text.check)
    fewest = min(len(domain.holdout or domain.rows) for domain in domains)
    together = ranks.all_agree(os.path.isdir(both.out) and fewest >= ranks.count)
    try:
        diagnosis = None
        if together or ranks.leads:
            diagnosis = both.measure(progress, ranks if together else SINGLE)
    except MoeMergeError as error:
        if page is not None or request.check:
            raise
        progress.note(error.message)
        return report
    if diagnosis is None or not measure or not measured:
        return report
    figures = both.figures(diagnosis)
    if ranks.leads:
        from moemerge.repairs.card import add_diagnosis

        for notice in loss_notices(figures):
            progress.note(notice)
        try:
            add_diagnosis(report, figures)
        except MoeMergeError as error:  # OUT is complete without it
            progress.note(f"{error.message}, so it lacks the figures measured on held-out rows")
    return replace(report, diagnosis=figures)


@dataclass(frozen=True)
class PrunedReport:
    """The reports of `prune`: of the pruning, and of the repair if one was requested."""

    pruning: Any
    repair: RepairReport | None = None

    def to_json(self) -> dict[str, Any]:
        document = {PRUNE.key: self.pruning.to_json()}
        if self.repair is not None:
            document[self.repair.repair.key] = self.repair.to_json()
        return document


# Settings of a repair after pruning that differ from its defaults. Targets are the original's
# routing on its own features: on the pruned model's features, its router and the original's agree.
AFTER_PRUNING: Mapping[str, tuple[Repair, dict[str, Any]]] = {
    "calibrate": (CALIBRATION, {"targets": "source-features", "objective": "exact"}),
    "refit": (REFIT, {}),
    "gradient": (REFIT, {"solver": "gradient"}),
}


@with_keywords(PruneSettings, OutputSettings)
def prune(
    model: ModelLike,
    out: str | Path,
    *,
    data: Mapping[str, Files],
    sources: Mapping[str, ModelLike] | None = None,
    settings: PruningSettings | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> PrunedReport:
    """Remove the experts of `model` that contribute least on text; write the model to `out`.

    `data` is text (JSON lines or parquet) under names of your choice. A repair
    (`repair="refit"`) fits to the `sources` of the text, by name; by default `model` is the source
    of every text. Then `resume` continues a killed run, and `report` is an HTML page to write: a
    diagnosis before and after.
    """
    output, values = output_for(OutputSettings, keywords, "prune")
    chosen = settings_for(PruneSettings, settings, values, "prune")
    after = chosen.repair if isinstance(chosen, PruneSettings) else "none"
    if after == "none" and (output.resume or output.report is not None):
        flag = "--resume" if output.resume else "--report"
        raise UsageError(
            f"{flag} belongs to the repair, and none is requested",
            hint='--repair refit (`repair="refit"`)',
        )
    if not data:
        raise UsageError(
            "no text is given, and experts are scored on text", hint="--data NAME=FILE.jsonl"
        )
    from moemerge.repairs.inputs import RepairRequest
    from moemerge.repairs.runners import load_runner

    progress, folder = progress or Silent(), Path(out)
    request: RepairRequest[Any] = RepairRequest(
        merged=model,
        out=folder,
        sources=dict.fromkeys(data, model) if sources is None else sources,
        data=_by_name(data),
        settings=chosen.narrowed(PruningSettings),
        overwrite=output.overwrite,
    )
    run_pruning = load_runner(PRUNE)
    with uploaded(folder, output.push_to_hub, progress):
        if after == "none":
            return PrunedReport(run_pruning(request, progress))
        check_output(folder, overwrite=output.overwrite)
        if output.report is not None:
            from moemerge.diagnosis.page import page_path

            page_path(output.report, (), overwrite=output.overwrite)
        repair, changes = AFTER_PRUNING[after]
        shared = {name: getattr(chosen, name) for name in (*StepSettings.model_fields, "measure")}
        fit = parse_settings(repair.settings, {**shared, **changes}, "settings of the repair")
        with temporary_sibling(folder) as place:
            scored = request.settings.model_copy(update={"holdout": fit.holdout})
            pruned = run_pruning(replace(request, out=place / "pruned", settings=scored), progress)
            second = replace(
                request,
                merged=place / "pruned",
                settings=fit,
                resume=output.resume,
                temporary=True,
            )
            label = "the pruned model before its repair"
            done = run_repair(repair, second, progress, output.report, label=label)
    return PrunedReport(replace(pruned, output=str(out)), done)


# --- measuring ------------------------------------------------------------------------------------


@with_keywords(DiagnosisSettings)
def diagnose(
    model: ModelLike,
    *,
    sources: Mapping[str, ModelLike],
    data: Mapping[str, Files],
    against: Sequence[ModelLike] = (),
    check: Mapping[str, Files] | None = None,
    experts: Mapping[str, str | Path] | None = None,
    settings: DiagnosisSettings | None = None,
    report: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Any,
) -> Diagnosis:
    """Measure how a merge changed the routing of `model`. Any tool may have merged it.

    `sources` are the merged models and `data` text of each (best held out from any calibration),
    under the same names. Text under any other name is measured against the `base`. Models in
    `against` are measured, too. `check` is text on which only the loss is measured; under the name
    of a source, that source is measured as well. `experts` are files with the kept experts of
    sources that have more experts than `model`, as for `calibrate`. `report` is an HTML page to
    write, and `overwrite` allows it to replace an earlier one.
    """
    from moemerge.diagnosis.job import DiagnosisRequest
    from moemerge.diagnosis.page import page_path
    from moemerge.diagnosis.run import run_diagnosis
    from moemerge.report.page import write_page

    request = DiagnosisRequest(
        model=model,
        sources=sources,
        data=_by_name(data),
        against=(against,) if isinstance(against, str | Path | ModelRef) else tuple(against),
        settings=settings_for(DiagnosisSettings, settings, keywords, "diagnose"),
        check=_by_name(check),
        experts=experts or {},
    )
    page = None
    if report is not None and leads():
        texts = chain(*request.data.values(), *request.check.values())
        inputs = (model, *sources.values(), *request.against, *texts)
        page = page_path(report, inputs, overwrite=overwrite)
    diagnosis = run_diagnosis(request, progress or Silent())
    if page is not None:
        write_page(diagnosis.to_json(), page)
    return diagnosis


@with_keywords(CollectingSettings)
def collect_statistics(
    model: ModelLike,
    out: str | Path,
    *,
    data: Files,
    settings: CollectingSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Any,
) -> CollectReport:
    """Collect Gram matrices or Fisher values of `model` over its text `data` into `out`."""
    from moemerge.statistics.collecting.job import CollectRequest
    from moemerge.statistics.collecting.run import run_collect

    chosen = settings_for(CollectingSettings, settings, keywords, "collect_statistics")
    request = CollectRequest(
        model=model, out=Path(out), data=files_of(data), settings=chosen, overwrite=overwrite
    )
    return run_collect(request, progress or Silent())


@with_keywords(CoefficientSettings)
def find_coefficients(
    method: CoefficientMethod,
    config: ConfigSource,
    out: str | Path,
    *,
    data: Mapping[str, Files] | None = None,
    settings: CoefficientSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Any,
) -> CoefficientsReport:
    """Find how much of each model of `config` a merge should take, layer by layer, into `out`.

    `method` is `acm`, `sens`, `neuron`, `adamerging` or `expertmerging`. `data` is text of each
    merged model by name, and overrides the config's own `data`. A config with
    `coefficients: OUT` applies the result.
    """
    if method not in get_args(CoefficientMethod):
        known = get_args(CoefficientMethod)
        raise UsageError(
            f"unknown way to find coefficients {method!r}{did_you_mean(method, known)}",
            hint=f"known: {', '.join(known)}",
        )
    chosen = settings_for(CoefficientSettings, settings, keywords, "find_coefficients")
    loaded = config
    if not isinstance(loaded, LoadedConfig):  # its file of coefficients may not exist yet
        loaded = check_config(read_document(loaded), coefficients=False)
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
    merged = {m.name: m.model for m in merge.slices[0].inputs if m.model != merge.base_model}
    given = _by_name(data)
    for name in given:
        if name not in merged:
            raise UsageError(
                f"data {name!r} belongs to no merged model{did_you_mean(name, merged)}",
                hint=f"merged are {', '.join(merged)}",
            )
    from moemerge.statistics.coefficients.job import CoefficientsRequest
    from moemerge.statistics.coefficients.run import run_coefficients

    own = {name: config_files(text) for name, text in (loaded.config.data or {}).items()}
    request = CoefficientsRequest(
        method=method,
        models=merged,
        base=merge.base_model,
        data={**own, **given},
        out=Path(out),
        settings=chosen,
        overwrite=overwrite,
    )
    return run_coefficients(request, progress or Silent())


# --- other forms of a model -----------------------------------------------------------------------


@with_keywords(ComposeSettings)
def compose(
    config: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    settings: ComposeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> ComposeReport:
    """Compose a MoE of dense models, or add experts to one, into the folder `out`.

    `out` appears complete or not at all. `config` is a YAML file as for mergekit-moe, or its
    content.
    """
    options = settings_for(ComposeSettings, settings, keywords, "compose")
    alone("compose")
    from moemerge.conversion.compose import load_compose_config, run_compose

    bar, folder = progress or Silent(), Path(out)
    loaded = load_compose_config(config)
    with uploaded(folder, options.push_to_hub, bar):
        if loaded.attention is None:
            return run_compose(loaded, folder, options, bar)
        merge_config = load_config(loaded.attention).merge_alone()
        resolved = config_data(merge_config.config, folder)
        loaded = loaded.model_copy(update={"attention": resolved})
        check_output(folder, overwrite=options.overwrite)
        with temporary_sibling(folder) as place:
            merge(merge_config, place / "attention", device=options.device, progress=bar)
            return run_compose(loaded, folder, options, bar, donor=place / "attention")


def swap_routers(
    model: ModelLike,
    donor: ModelLike,
    out: str | Path,
    *,
    layers: object = "all",
    link: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SwapReport:
    """Write `model` with the routers of `donor` (of the same family) to `out`.

    `link` makes hard links of the shards without routers, if the file system allows it.
    """
    from moemerge.diagnosis.swap import swap_routers as swap

    return swap(
        model,
        donor,
        Path(out),
        layers=LayerSelection.parse(layers),
        link=link,
        overwrite=overwrite,
        progress=progress or Silent(),
    )


def extract(
    shared: ModelLike,
    task: str,
    out: str | Path,
    *,
    base: ModelLike | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExtractReport:
    """Write one model of a merge that kept them (`tasks:` in its config) to `out`.

    `task` is the name of that model. `base` is the base model's new path if it has moved since.
    """
    from moemerge.merging.extract import extract_model

    bar = progress or Silent()
    return extract_model(shared, task, Path(out), base=base, overwrite=overwrite, progress=bar)


@with_keywords(ExtractLoraSettings)
def extract_lora(
    model: ModelLike,
    base: ModelLike,
    out: str | Path,
    *,
    settings: ExtractLoraSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Any,
) -> ExtractLoraReport:
    """Write the difference of `model` and `base` as a LoRA adapter in PEFT's format to `out`."""
    options = settings_for(ExtractLoraSettings, settings, keywords, "extract_lora")
    from moemerge.conversion.extract_lora import extract_lora as run

    bar = progress or Silent()
    return run(model, base, Path(out), options, overwrite=overwrite, progress=bar)


def convert(
    model: ModelLike,
    out: str | Path,
    *,
    layout: ExpertLayoutName,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write `model` with its experts in another layout to `out`, bit for bit.

    `per-expert` is the layout in which most families are published, `fused` that of transformers'
    models in memory.
    """
    from moemerge.conversion.convert import convert as run

    if layout not in get_args(ExpertLayoutName):
        known = ", ".join(get_args(ExpertLayoutName))
        raise UsageError(f"unknown layout {layout!r}", hint=f"known: {known}")
    return run(model, Path(out), layout, overwrite=overwrite, progress=progress or Silent())


# --- looking --------------------------------------------------------------------------------------


@paused_collector()
def inspect(model: str | Path) -> Description:
    """Describe a model folder or hub model from its headers."""
    checkpoint = Checkpoint.open(model)
    return describe(checkpoint.config, checkpoint.tensors)


def verify(folder: str | Path) -> Verification:
    """Compare the files of a folder that moemerge has written with the checksums in its report."""
    path = Path(folder).expanduser()
    if not os.path.isdir(path):
        raise UsageError(
            f"{folder} is not a folder", hint="name a folder that moemerge has written"
        )
    return verify_checksums(path)


def config_schema() -> dict[str, Any]:
    """Return a JSON schema of config files, with all methods, for editors."""
    return schema_of({**wrapper_schemas(), **method_schemas()})


def method_schemas() -> dict[str, MethodSchema]:
    """Return the declaration of every merge method, by name."""
    from moemerge import merging

    merging.load_plugins()
    return {name: merging.METHODS.get(name).schema for name in sorted(merging.METHODS)}


def wrapper_schemas() -> dict[str, WrapperSchema]:
    """Return the declaration of every wrapper, by name."""
    from moemerge import merging

    merging.load_plugins()
    return {name: merging.WRAPPERS.get(name).schema for name in sorted(merging.WRAPPERS)}


# The groups of `ls methods`, in their order.
AVERAGES = "without task vectors: models and, where one is given, the base"
CHANGES = "changes against a base, in passes over the weights"
MATRICES = "matrix by matrix: decompositions of each, or steps"
INFORMED = "from statistics of each model's own text"


def list_methods() -> list[dict[str, Any]]:
    """Return every merge method with its parameters and requirements, by group."""
    from moemerge import merging

    def group(schema: MethodSchema) -> str:
        if schema.statistics is not None:
            return INFORMED
        if schema.time != "passes":
            return MATRICES
        return CHANGES if schema.base is BasePolicy.REQUIRED else AVERAGES

    order = (AVERAGES, CHANGES, MATRICES, INFORMED)
    schemas = sorted(method_schemas().items(), key=lambda item: order.index(group(item[1])))
    return [
        {
            "method": name,
            "group": group(schema),
            "what_it_does": schema.summary,
            "base_model": schema.base.value,
            "statistics": schema.statistics,
            "memory": "runs" if merging.METHODS.get(name).elementwise else "units",
            "time": schema.time,
            "per_model": _parameters(schema, per_model=True),
            "options": _parameters(schema, per_model=False),
        }
        for name, schema in schemas
    ]


def list_wrappers() -> list[dict[str, Any]]:
    """Return every wrapper with its parameters."""
    return [
        {
            "wrapper": name,
            "what_it_does": schema.summary,
            "statistics": schema.statistics,
            "options": _parameters(schema, per_model=False),
        }
        for name, schema in wrapper_schemas().items()
    ]


def _parameters(schema: MethodSchema, *, per_model: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": p.name,
            "default": "required" if p.default is REQUIRED else p.default,
            "help": p.help,
        }
        for p in schema.parameters
        if p.per_model == per_model
    ]


def list_architectures() -> list[dict[str, Any]]:
    """Return every MoE family, and whether its routers can be calibrated."""
    return [
        {
            "family": family.model_type,
            "also": [name for name in family.model_types if name != family.model_type],
            "calibration": "yes" if family.served else "no",
            "why": family.reason,
        }
        for family in families()
    ]


def load_plugin(path: str | Path) -> None:
    """Import the file `path` under its own name, once, and register its content.

    Its functions can also verify answers: those of `judge.py` as `verify="judge:FUNCTION"`.
    """
    advice = "a plugin is a Python file that registers something when it is imported: docs/methods"
    file, name = Path(path), Path(path).stem
    if not os.path.isfile(file) or file.suffix != ".py":
        what = "is no Python file (.py)" if os.path.exists(file) else "does not exist"
        raise UsageError(f"the plugin {path} {what}", hint=advice)
    if name in sys.modules:
        taken: str | None = getattr(sys.modules[name], "__file__", None) or "built-in"
    else:
        other = importlib.util.find_spec(name)
        taken = None if other is None else other.origin or "built-in"
    if taken is not None and not (os.path.exists(taken) and file.samefile(taken)):
        raise UsageError(
            f"the plugin {path} has the name of another module, {name!r}", hint="rename the file"
        )
    add_plugin(name, str(path))
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # for a name that ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[name]
        raise
    except BaseException as error:  # whatever the user's file does when it is imported
        del sys.modules[name]
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
        where = f"line {lines[-1]}: " if lines else ""
        raise UsageError(
            f"the plugin {path} cannot be imported: {where}{type(error).__name__}: {error}",
            hint=advice,
        ) from error
