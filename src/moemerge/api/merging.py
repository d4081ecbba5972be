"""Merging: read a config, check it, merge, and repair the merge where the config says so."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from moemerge import merging
from moemerge.api.answers import check_recipes, make_texts
from moemerge.api.jobs import output_for, repair, settings_for, uploaded
from moemerge.api.listing import method_schemas, wrapper_schemas
from moemerge.checkpoint import check_output
from moemerge.checkpoint.output import temporary_sibling
from moemerge.config.calibration import CalibrationBlock, CalibrationKeywords
from moemerge.config.load import LoadedConfig
from moemerge.config.load import load_config as _load_config
from moemerge.config.refit import RefitBlock, RefitKeywords
from moemerge.config.requests import SourceData
from moemerge.config.settings import (
    MergeKeywords,
    MergeSettings,
    OutputKeywords,
    OutputSettings,
    as_flags,
    plugin_flags,
    with_keywords,
)
from moemerge.config.translate import parse_settings
from moemerge.errors import UsageError
from moemerge.lockstep.models import check_sources
from moemerge.merging.report import MergeReport
from moemerge.runtime import ranks
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress, Silent
from moemerge.text.rows import check_text

if TYPE_CHECKING:
    from moemerge.calibration import CalibrationReport
    from moemerge.refitting import RefitReport

ConfigSource = str | Path | Mapping[str, Any] | LoadedConfig
# What a page calls a merge that only lives while `run` works.
MERGE_ALONE = "the merge before its repair"
# What `run` does after the merge, by the key of its block.
BLOCKS: Mapping[str, type[CalibrationBlock] | type[RefitBlock]] = {
    "calibration": CalibrationBlock,
    "refit": RefitBlock,
}


class RunKeywords(MergeKeywords, OutputKeywords, total=False):
    """Keywords of `run`."""


def load_config(source: ConfigSource, *, lenient: bool = False) -> LoadedConfig:
    """Read and check a config (a YAML path, or its content as a mapping)."""
    if isinstance(source, LoadedConfig):
        return source
    schemas, wrappers = method_schemas(), wrapper_schemas()
    return _load_config(source, schemas=schemas, wrappers=wrappers, lenient=lenient)


@with_keywords(MergeKeywords, MergeSettings)
def merge(
    config: ConfigSource,
    out: str | Path,
    *,
    settings: MergeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[MergeKeywords],
) -> MergeReport:
    """Merge models as `config` says into the folder `out`, which appears whole or not at all.

    Settings are given as a whole, or one by one: `merge(..., overwrite=True, device="cpu")`.
    Under torchrun every process must call it: each merges some tensors, rank 0 puts `out` in place.
    """
    settings = settings_for(MergeSettings, settings, keywords, "merge")
    loaded = load_config(config, lenient=settings.lenient).merge_alone()
    progress = Silent() if progress is None else progress
    with uploaded(Path(out), settings.push_to_hub if ranks.leads() else None, progress):
        return _merge(loaded, Path(out), settings, progress)


def _merge(
    loaded: LoadedConfig,
    out: Path,
    settings: MergeSettings,
    progress: Progress,
    *,
    temporary: bool = False,
) -> MergeReport:
    """Merge; statistics that the config has text for instead are made first, and go at the end."""
    ranks.on_one_machine("merge")
    # Before models are run for hours. What OUT may be, rank 0 asks.
    job = merging.plan_merge(loaded, settings, out if ranks.leads() else None)
    if not all(Path(file).exists() for file in loaded.texts):
        ranks.alone("making the text that a config has recipes for")
    make_texts(loaded, progress)
    if ranks.asked_for() > 1:
        ranks.join(resolve_device(settings.device))
    wanted = loaded.statistics
    if wanted is None or wanted.complete:
        return merging.run_merge(job, out, progress, temporary=temporary)
    from moemerge.collecting.run import computed_statistics

    models, device = loaded.merge.models, settings.device
    with computed_statistics(wanted, models, out, device, progress) as files:
        job = job.with_statistics(files)
        return merging.run_merge(job, out, progress, temporary=temporary)


@with_keywords(MergeKeywords, MergeSettings)
def validate(
    config: ConfigSource,
    out: str | Path | None = None,
    *,
    settings: MergeSettings | None = None,
    **keywords: Unpack[MergeKeywords],
) -> MergeReport:
    """Plan a merge (into `out`) and check all that can be checked without reading a tensor.

    Of text the first rows are read; of a repair its sources and layers are checked.
    """
    settings = settings_for(MergeSettings, settings, keywords, "validate")
    loaded = load_config(config, lenient=settings.lenient)
    if settings.push_to_hub is not None:
        from moemerge.checkpoint.hub import check_upload

        check_upload(settings.push_to_hub)
    _check_repair(loaded)
    check_recipes(loaded)
    return merging.plan_merge(loaded, settings, None if out is None else Path(out)).report


@dataclass(frozen=True)
class RunReport:
    """What `run` did; a part that the config does not ask for is None."""

    merge: MergeReport
    calibration: CalibrationReport | None = None
    refit: RefitReport | None = None

    def to_json(self) -> dict[str, Any]:
        parts = {"merge": self.merge, "calibration": self.calibration, "refit": self.refit}
        return {name: part.to_json() for name, part in parts.items() if part is not None}


@with_keywords(RunKeywords, MergeSettings, OutputSettings)
def run(
    config: ConfigSource,
    out: str | Path,
    *,
    settings: MergeSettings | None = None,
    calibration: CalibrationKeywords | None = None,
    refit: RefitKeywords | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[RunKeywords],
) -> RunReport:
    """Merge, then repair as the config's `calibration:` or `refit:` block says, into `out`.

    `calibration` and `refit` hold settings that beat the block's. The merge as it was exists only
    while this runs; a killed run that is resumed merges again and goes on with the first unfinished
    layer. `report` is an HTML page to write, as of `calibrate`.
    """
    output, values = output_for(OutputSettings, keywords, "run")
    if "overwrite" in keywords:
        values["overwrite"] = output.overwrite
    settings = settings_for(MergeSettings, settings, values, "run")
    loaded = load_config(config, lenient=settings.lenient)
    progress = Silent() if progress is None else progress
    out = Path(out)
    given: dict[str, Mapping[str, Any]] = {
        "calibration": cast(Mapping[str, Any], calibration or {}),
        "refit": cast(Mapping[str, Any], refit or {}),
    }
    key = next((key for key in BLOCKS if getattr(loaded, key) is not None), None)
    _refuse_idle(key, given, output.report)
    if key is None:
        with uploaded(out, output.push_to_hub or settings.push_to_hub, progress):
            return RunReport(_merge(loaded, out, settings, progress))
    loaded = _with_settings(loaded, key, given[key])
    check_output(out, overwrite=settings.overwrite)
    _check_repair(loaded)
    check_recipes(loaded)
    if output.report is not None:
        from moemerge.diagnosis.page import page_path

        page_path(output.report)
    chosen = [name for name in MergeSettings.model_fields if name in settings.model_fields_set]
    flags = {name: getattr(settings, name) for name in chosen}
    page = Page(output.report, _run_command(config, out, {**given[key], **flags}, output.report))
    repo = output.push_to_hub or settings.push_to_hub
    with uploaded(out, repo, progress), temporary_sibling(out) as folder:
        merged = _merge(loaded, folder / "merged", settings, progress, temporary=True)
        values = {
            "merged": folder / "merged",
            "out": out,
            "overwrite": settings.overwrite,
            "resume": output.resume,
        }
        done = _repair(loaded, key, values, progress, page)
    return RunReport(replace(merged, output=str(out)), **{key: done})


@dataclass(frozen=True)
class Page:
    """An HTML page to write, if there is a file for it, and the command that it names."""

    file: Path | None
    command: str


def _repair(
    loaded: LoadedConfig, key: str, values: Mapping[str, Any], progress: Progress, page: Page
) -> Any:
    """What the block `key` of the config asks for; `values` are the request's, whichever it is."""
    wanted: SourceData = getattr(loaded, key)
    block = getattr(loaded.config, key)
    values = {
        **values,
        "sources": wanted.sources,
        "data": wanted.data,
        "settings": block.settings,
        "weights": block.weights or {},
        "temporary": True,
    }
    words = {"label": MERGE_ALONE, "command": page.command}
    if key == "calibration":
        from moemerge.calibration import CalibrationRequest, run_calibration

        return repair(run_calibration, CalibrationRequest(**values), progress, page.file, **words)
    from moemerge.refitting import RefitRequest, run_refit

    return repair(run_refit, RefitRequest(**values), progress, page.file, **words)


def _check_repair(loaded: LoadedConfig) -> None:
    """What can be refused of a calibration or a refit before its merge is made."""
    for key in BLOCKS:
        wanted: SourceData | None = getattr(loaded, key)
        if wanted is not None:
            check_text(loaded.existing(wanted.data))
            layers = getattr(loaded.config, key).layers
            check_sources(wanted.sources, layers, routers=key == "calibration")


def _refuse_idle(
    key: str | None, given: Mapping[str, Mapping[str, Any]], report: str | Path | None
) -> None:
    """What only makes sense with a block that the config does not have."""
    if key is None and report is not None:
        raise UsageError(
            f"a report {report} is asked for, but the config has no calibration: or refit: block",
            hint="its sources and data are what routing is measured with; or use "
            "`moemerge diagnose` on the merged model",
        )
    understood = {*MergeSettings.model_fields, *(BLOCKS[key].model_fields if key else ())}
    for other, values in given.items():
        idle = [name for name in values if name not in understood]
        if idle:
            raise UsageError(
                f"settings of a {other} are given ({', '.join(idle)}), but the config has no "
                f"{other}: block",
                hint="add the block (an empty one means defaults), or leave the settings out",
            )


def _run_command(
    config: ConfigSource, out: Path, given: Mapping[str, Any], report: str | Path | None
) -> str:
    """The command line that repeats a run; CONFIG stands for one that was no file."""
    words = ["moemerge", "run", str(config) if isinstance(config, str | Path) else "CONFIG"]
    flags = ["--report", str(report), *as_flags(given), *plugin_flags()]
    return shlex.join([*words, str(out), *flags])


def _with_settings(loaded: LoadedConfig, key: str, given: Mapping[str, Any]) -> LoadedConfig:
    block = getattr(loaded.config, key)
    if not given:
        return loaded
    values = {name: getattr(block, name) for name in BLOCKS[key].model_fields}
    for one, other in (("alpha", "gamma"), ("gamma", "alpha")):
        if one in given:
            values.pop(other)
    values = {name: value for name, value in values.items() if value is not None}
    changed = parse_settings(BLOCKS[key], {**values, **given}, f"{key} settings")
    return replace(loaded, config=loaded.config.model_copy(update={key: changed}))
