"""A config back as YAML, such that reading it again gives the same config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from moemerge.config.layers import LayerSelection
from moemerge.config.models import ModelRef
from moemerge.config.parameter_values import Conditional, Gradient, plain
from moemerge.config.schema import RunConfig
from moemerge.config.yaml_lines import Dumper

_ALWAYS = ("calibration",)  # written with their defaults, which a later version may change
_FIRST = ("merge_method", "base_model")


def dump_config(config: RunConfig) -> str:
    """YAML text of a config, with the settings of a calibration spelt out."""
    text: str = yaml.dump(config_data(config), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text


def config_data(config: RunConfig) -> dict[str, Any]:
    """The config as plain data: what a YAML or JSON file holds."""
    data: dict[str, Any] = _mapping(config)
    first = {key: data[key] for key in _FIRST if key in data}
    return {**first, **{key: value for key, value in data.items() if key not in first}}


def _mapping(model: BaseModel, *, full: bool = False) -> dict[str, Any]:
    result = {}
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        default = info.get_default(call_default_factory=True)
        if value is not None and (full or value != default):
            result[name] = _plain(value, full=full or name in _ALWAYS)
    return result


def _plain(value: Any, *, full: bool) -> Any:
    if isinstance(value, BaseModel):
        return _mapping(value, full=full)
    if isinstance(value, ModelRef):
        return _model(value)
    if isinstance(value, LayerSelection):
        return str(value)
    if isinstance(value, (Gradient, Conditional)):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, full=full) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, full=full) for item in value]
    return value


def _model(ref: ModelRef) -> Any:
    """Text, or mergekit's mapping where the text would be read as something else."""
    parts = (ref.path, ref.revision, ref.lora, ref.lora_revision)
    if not any(mark in part for part in parts if part for mark in "@+"):
        return str(ref)
    side = {"path": ref.path, "revision": ref.revision}
    result: dict[str, Any] = {"model": {k: v for k, v in side.items() if v is not None}}
    if ref.lora is not None:
        lora = {"path": ref.lora, "revision": ref.lora_revision}
        result["lora"] = {k: v for k, v in lora.items() if v is not None}
    return result
