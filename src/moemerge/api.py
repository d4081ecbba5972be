"""The Python interface: check everything first, then do it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemerge import merging
from moemerge.architectures import describe
from moemerge.architectures.families import FAMILIES
from moemerge.checkpoint import Checkpoint
from moemerge.config.load import LoadedConfig
from moemerge.config.load import load_config as _load_config
from moemerge.config.options import MergeOptions
from moemerge.merging import METHODS
from moemerge.merging.report import MergeReport
from moemerge.runtime.progress import Progress, Silent

ConfigSource = str | Path | Mapping[str, Any] | LoadedConfig


def load_config(source: ConfigSource, *, lenient: bool = False) -> LoadedConfig:
    """Read and check a config (a YAML path, or its content as a mapping)."""
    if isinstance(source, LoadedConfig):
        return source
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


def inspect(model: str | Path) -> describe.Description:
    """What a model folder or hub model is, from its headers alone."""
    checkpoint = Checkpoint.open(model)
    return describe.describe(checkpoint.config, checkpoint.tensors)


def list_methods() -> list[dict[str, Any]]:
    """Every merge method with its parameters."""
    rows = []
    for name in sorted(METHODS):
        schema = METHODS.get(name).schema
        rows.append(
            {
                "method": name,
                "what_it_does": schema.summary,
                "base_model": schema.base.value,
                "per_model": [p.name for p in schema.parameters if p.per_model],
                "options": [p.name for p in schema.parameters if not p.per_model],
            }
        )
    return rows


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
