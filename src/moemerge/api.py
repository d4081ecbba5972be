"""The Python interface: check everything first, then do it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemerge import merging
from moemerge.architectures import describe
from moemerge.architectures.families import FAMILIES
from moemerge.checkpoint import Checkpoint, check_output
from moemerge.checkpoint.passing import passing_folder
from moemerge.config.calibration import CalibrationBlock, CalibrationSettings
from moemerge.config.diagnosis import DiagnosisSettings
from moemerge.config.layers import LayerSelection
from moemerge.config.load import LoadedConfig
from moemerge.config.load import load_config as _load_config
from moemerge.config.models import ModelRef
from moemerge.config.options import MergeOptions
from moemerge.config.parameters import REQUIRED, MethodSchema
from moemerge.config.translate import parse_settings
from moemerge.errors import UsageError
from moemerge.merging import METHODS
from moemerge.merging.report import MergeReport
from moemerge.runtime.progress import Progress, Silent
from moemerge.text.rows import TextSource

# Calibration runs models, and so imports transformers: only when it is asked for.
if TYPE_CHECKING:
    from moemerge.calibration import CalibrationReport, CalibrationRequest
    from moemerge.collecting import CollectReport
    from moemerge.diagnosis import Diagnosis, SwapReport
    from moemerge.diagnosis.page import BeforeAndAfter

ConfigSource = str | Path | Mapping[str, Any] | LoadedConfig
Model = str | Path | ModelRef
Files = str | Path | Sequence[TextSource]  # files, or rows in memory
# What a page calls a merge that only lives while `run` works.
MERGE_ALONE = "the merge before calibration"


def load_config(source: ConfigSource, *, lenient: bool = False) -> LoadedConfig:
    """Read and check a config (a YAML path, or its content as a mapping)."""
    if isinstance(source, LoadedConfig):
        return source
    merging.load_plugins()
    schemas = {name: METHODS.get(name).schema for name in METHODS}
    return _load_config(source, schemas=schemas, lenient=lenient)


def merge(
    config: ConfigSource,
    out: str | Path,
    options: MergeOptions | None = None,
    *,
    progress: Progress | None = None,
) -> MergeReport:
    """Merge models as `config` says into the folder `out`, which appears whole or not at all."""
    options = options or MergeOptions()
    loaded = load_config(config, lenient=options.lenient)
    return _merge(loaded, Path(out), options, progress or Silent())


def _merge(
    loaded: LoadedConfig,
    out: Path,
    options: MergeOptions,
    progress: Progress,
    *,
    temporary: bool = False,
) -> MergeReport:
    """Merge; statistics that the config has text for instead are made first, and go at the end."""
    job = merging.plan_merge(loaded, options, out)  # before models are run for hours
    wanted = loaded.statistics
    if wanted is None or wanted.complete:
        return merging.run_merge(job, out, progress, temporary=temporary)
    from moemerge.collecting.on_the_way import computed_statistics

    models, device = loaded.merge.models, options.device
    with computed_statistics(wanted, models, out, device, progress) as files:
        job = job.with_statistics(files)
        return merging.run_merge(job, out, progress, temporary=temporary)


def validate(
    config: ConfigSource, options: MergeOptions | None = None, *, out: str | Path | None = None
) -> MergeReport:
    """Plan a merge and check all that can be checked without reading a tensor."""
    options = options or MergeOptions()
    loaded = load_config(config, lenient=options.lenient)
    return merging.plan_merge(loaded, options, None if out is None else Path(out)).report


def calibrate(
    merged: Model,
    out: str | Path,
    *,
    sources: Mapping[str, Model],
    data: Mapping[str, Files],
    settings: CalibrationSettings | None = None,
    overwrite: bool = False,
    resume: bool = False,
    report: str | Path | None = None,
    progress: Progress | None = None,
    **values: Any,
) -> CalibrationReport:
    """Solve for the routers of `merged` and write the calibrated model to `out`.

    `sources` are the merged models and `data` their text (JSON lines or parquet), under the same
    names. Settings are given as a whole, or one by one: `calibrate(..., alpha=0.5, layers="8-15")`.
    `report` is an HTML page to write: a diagnosis before and after, on the rows held out (on the
    same rows, where none are).
    """
    from moemerge.calibration import CalibrationRequest, run_calibration

    if settings is not None and values:
        raise UsageError(
            f"settings were given as a whole and also one by one: {', '.join(values)}",
            hint="give either `settings` or single values",
        )
    request = CalibrationRequest(
        merged=merged,
        out=Path(out),
        sources=sources,
        data={name: _files(files) for name, files in data.items()},
        settings=settings or parse_settings(CalibrationSettings, values, "calibration settings"),
        overwrite=overwrite,
        resume=resume,
    )
    progress = Silent() if progress is None else progress
    page = _before_and_after(report, request)
    done = run_calibration(request, progress)
    if page is not None:
        page.write(progress)
    return done


def _files(files: Files) -> tuple[TextSource, ...]:
    return (files,) if isinstance(files, str | Path) else tuple(files)


@dataclass(frozen=True)
class RunReport:
    """What `run` did; `calibration` is None for a config that asks for none."""

    merge: MergeReport
    calibration: CalibrationReport | None

    def to_json(self) -> dict[str, Any]:
        found = {"merge": self.merge.to_json()}
        if self.calibration is not None:
            found["calibration"] = self.calibration.to_json()
        return found


def run(
    config: ConfigSource,
    out: str | Path,
    options: MergeOptions | None = None,
    *,
    resume: bool = False,
    calibration: Mapping[str, Any] | None = None,
    report: str | Path | None = None,
    progress: Progress | None = None,
) -> RunReport:
    """Merge, then calibrate where the config has a `calibration:` block, into the folder `out`.

    `calibration` holds settings that beat the block's. The uncalibrated merge exists only while
    this runs; a killed run that is resumed merges again and goes on with the first unfinished
    layer. `report` is an HTML page to write, as of `calibrate`.
    """
    options = options or MergeOptions()
    loaded = load_config(config, lenient=options.lenient)
    progress = Silent() if progress is None else progress
    out = Path(out)
    if loaded.calibration is None:
        if report is not None:
            raise UsageError(
                f"a report {report} is asked for, but the config has no calibration: block",
                hint="its sources and data are what routing is measured with; or use "
                "`moemerge diagnose` on the merged model",
            )
        return RunReport(_merge(loaded, out, options, progress), None)
    loaded = _with_settings(loaded, calibration or {})
    wanted, block = loaded.calibration, loaded.config.calibration
    assert wanted is not None  # `_with_settings` keeps what there was
    assert block is not None
    from moemerge.calibration import CalibrationRequest, run_calibration
    from moemerge.calibration.after_merge import check_calibration

    check_output(out, overwrite=options.overwrite)
    check_calibration(wanted)
    if report is not None:
        from moemerge.diagnosis.page import page_path

        page_path(report)
    with passing_folder(out) as folder:
        merged = _merge(loaded, folder / "merged", options, progress, temporary=True)
        request = CalibrationRequest(
            merged=folder / "merged",
            out=out,
            sources=wanted.sources,
            data=wanted.data,
            settings=block.settings,
            overwrite=options.overwrite,
            resume=resume,
            passing=True,
        )
        command = _run_command(config, out, calibration or {}, report)
        page = _before_and_after(report, request, MERGE_ALONE, command)
        calibrated = run_calibration(request, progress)
        if page is not None:
            page.write(progress)
    return RunReport(replace(merged, output=str(out)), calibrated)


def _run_command(
    config: ConfigSource, out: Path, given: Mapping[str, Any], report: str | Path | None
) -> str:
    """The command line that repeats a run; CONFIG stands for one that was no file."""
    words = ["moemerge", "run", str(config) if isinstance(config, str | Path) else "CONFIG"]
    words += [str(out), "--report", str(report)]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)


def _with_settings(loaded: LoadedConfig, given: Mapping[str, Any]) -> LoadedConfig:
    block = loaded.config.calibration
    if not given or block is None:
        return loaded
    values = {name: getattr(block, name) for name in CalibrationBlock.model_fields}
    for one, other in (("alpha", "gamma"), ("gamma", "alpha")):
        if one in given:
            values.pop(other)
    values = {name: value for name, value in values.items() if value is not None}
    changed = parse_settings(CalibrationBlock, {**values, **given}, "calibration settings")
    return replace(loaded, config=loaded.config.model_copy(update={"calibration": changed}))


def inspect(model: str | Path) -> describe.Description:
    """What a model folder or hub model is, from its headers alone."""
    checkpoint = Checkpoint.open(model)
    return describe.describe(checkpoint.config, checkpoint.tensors)


def list_methods() -> list[dict[str, Any]]:
    """Every merge method with its parameters."""
    merging.load_plugins()
    rows = []
    for name in sorted(METHODS):
        schema = METHODS.get(name).schema
        rows.append(
            {
                "method": name,
                "what_it_does": schema.summary,
                "base_model": schema.base.value,
                "statistics": schema.statistics,
                "per_model": _parameters(schema, per_model=True),
                "options": _parameters(schema, per_model=False),
            }
        )
    return rows


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
    """Every MoE family of the table, and whether its routers can be calibrated."""
    return [
        {
            "family": family.model_type,
            "also": [name for name in family.model_types if name != family.model_type],
            "calibration": "yes" if family.served else "no",
            "why": family.reason,
        }
        for family in FAMILIES
    ]


def diagnose(
    model: Model,
    *,
    sources: Mapping[str, Model],
    data: Mapping[str, Files],
    against: Sequence[Model] = (),
    settings: DiagnosisSettings | None = None,
    report: str | Path | None = None,
    progress: Progress | None = None,
    **values: Any,
) -> Diagnosis:
    """Measure what a merge did to the routing of `model`, whoever merged it.

    `sources` are the merged models and `data` text of each (best held out from any calibration),
    under the same names; models in `against` are measured beside it. Settings are given as a
    whole, or one by one: `diagnose(..., swaps=True, max_tokens=20_000)`. `report` is an HTML page
    to write.
    """
    from moemerge.diagnosis import DiagnosisRequest, run_diagnosis
    from moemerge.diagnosis.page import page_path
    from moemerge.report.page import write_page

    if settings is not None and values:
        raise UsageError(
            f"settings were given as a whole and also one by one: {', '.join(values)}",
            hint="give either `settings` or single values",
        )
    request = DiagnosisRequest(
        model=model,
        sources=sources,
        data={name: _files(files) for name, files in data.items()},
        against=(against,) if isinstance(against, str | Path | ModelRef) else tuple(against),
        settings=settings or parse_settings(DiagnosisSettings, values, "diagnosis settings"),
    )
    page = None if report is None else page_path(report)
    found = run_diagnosis(request, Silent() if progress is None else progress)
    if page is not None:
        write_page(found.to_json(), page)
    return found


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

    return swap(
        model,
        donor,
        Path(out),
        layers=LayerSelection.parse(layers),
        link=link,
        overwrite=overwrite,
        progress=Silent() if progress is None else progress,
    )


def _before_and_after(
    report: str | Path | None,
    done: CalibrationRequest,
    label: str | None = None,
    command: str | None = None,
) -> BeforeAndAfter | None:
    """The page of a calibration, if one is wanted."""
    if report is None:
        return None
    from moemerge.diagnosis.page import BeforeAndAfter

    settings = {name: getattr(done.settings, name) for name in CalibrationSettings.model_fields}
    models = (done.merged, done.out)
    return BeforeAndAfter.of(
        report, models, done.sources, done.data, settings, label=label, command=command
    )


def collect_statistics(
    model: Model,
    out: str | Path,
    *,
    data: Files,
    overwrite: bool = False,
    progress: Progress | None = None,
    **values: Any,
) -> CollectReport:
    """Gather Grams or Fisher values of `model` over its text `data` into the file `out`.

    Settings are given one by one: `collect_statistics(..., kind="fisher", max_tokens=100_000)`.
    """
    from moemerge.collecting import CollectRequest, run_collect
    from moemerge.config.collecting import CollectingSettings

    request = CollectRequest(
        model=model,
        out=Path(out),
        data=_files(data),
        settings=parse_settings(CollectingSettings, values, "statistics settings"),
        overwrite=overwrite,
    )
    return run_collect(request, Silent() if progress is None else progress)
