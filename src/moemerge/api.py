"""The Python interface: check everything first, then do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemerge import merging
from moemerge.architectures import describe
from moemerge.architectures.families import FAMILIES
from moemerge.checkpoint import Checkpoint, check_output
from moemerge.config.calibration import CalibrationBlock, CalibrationSettings
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

# Calibration runs models, and so imports transformers: only when it is asked for.
if TYPE_CHECKING:
    from moemerge.calibration import CalibrationReport

ConfigSource = str | Path | Mapping[str, Any] | LoadedConfig
Model = str | Path | ModelRef
Files = str | Path | Sequence[str | Path]


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
    return merging.run_merge(loaded, Path(out), options, progress or Silent())


def validate(
    config: ConfigSource, options: MergeOptions | None = None, *, out: str | Path | None = None
) -> MergeReport:
    """Plan a merge and check all that can be checked without reading a tensor."""
    options = options or MergeOptions()
    loaded = load_config(config, lenient=options.lenient)
    return merging.check_merge(loaded, None if out is None else Path(out), options)


def calibrate(
    merged: Model,
    out: str | Path,
    *,
    sources: Mapping[str, Model],
    data: Mapping[str, Files],
    settings: CalibrationSettings | None = None,
    overwrite: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
    **values: Any,
) -> CalibrationReport:
    """Solve for the routers of `merged` and write the calibrated model to `out`.

    `sources` are the merged models and `data` their text (JSON lines or parquet), under the same
    names. Settings are given as a whole, or one by one: `calibrate(..., alpha=0.5, layers="8-15")`.
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
    return run_calibration(request, Silent() if progress is None else progress)


def _files(files: Files) -> tuple[str | Path, ...]:
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
    progress: Progress | None = None,
) -> RunReport:
    """Merge, then calibrate where the config has a `calibration:` block, into the folder `out`.

    `calibration` holds settings that beat the block's. The uncalibrated merge exists only while
    this runs; a killed run that is resumed merges again and goes on with the first unfinished
    layer.
    """
    options = options or MergeOptions()
    loaded = load_config(config, lenient=options.lenient)
    progress = Silent() if progress is None else progress
    out = Path(out)
    if loaded.calibration is None:
        return RunReport(merging.run_merge(loaded, out, options, progress), None)
    loaded = _with_settings(loaded, calibration or {})
    wanted = loaded.calibration
    assert wanted is not None  # `_with_settings` keeps what there was
    from moemerge.calibration import CalibrationRequest, run_calibration
    from moemerge.calibration.after_merge import check_calibration, passing_folder

    check_output(out, overwrite=options.overwrite)
    check_calibration(wanted)
    with passing_folder(out) as folder:
        merged = merging.run_merge(loaded, folder, options, progress)
        request = CalibrationRequest(
            merged=folder,
            out=out,
            sources=wanted.sources,
            data=wanted.data,
            settings=wanted.settings,
            overwrite=options.overwrite,
            resume=resume,
            passing=True,
        )
        report = run_calibration(request, progress)
    return RunReport(replace(merged, output=str(out)), report)


def _with_settings(loaded: LoadedConfig, given: Mapping[str, Any]) -> LoadedConfig:
    block, wanted = loaded.config.calibration, loaded.calibration
    if not given or block is None or wanted is None:
        return loaded
    values = {name: getattr(block, name) for name in CalibrationBlock.model_fields}
    for one, other in (("alpha", "gamma"), ("gamma", "alpha")):
        if one in given:
            values.pop(other)
    values = {name: value for name, value in values.items() if value is not None}
    changed = parse_settings(CalibrationBlock, {**values, **given}, "calibration settings")
    return replace(
        loaded,
        config=loaded.config.model_copy(update={"calibration": changed}),
        calibration=replace(wanted, settings=changed.settings),
    )


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
