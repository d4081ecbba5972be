"""A config back as YAML, such that reading it again gives the same config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml
from pydantic import BaseModel

from moemerge.config.data import DataRecipe
from moemerge.config.fields import LayerSelection
from moemerge.config.models import ModelRef
from moemerge.config.parameter_values import Conditional, Gradient, plain
from moemerge.config.schema import RunConfig
from moemerge.config.yaml_lines import Dumper

_ALWAYS = ("calibration", "refit")  # written with their defaults, which a later version may change
_FIRST = ("merge_method", "base_model")
_FILES = ("data", "statistics")  # whose values are file names


def dump_config(config: RunConfig, *, absolute: bool = False) -> str:
    """YAML text of a config, with the settings of a calibration spelt out.

    With `absolute` it means the same in every working directory: files and local models are
    written with their whole path.
    """
    return dump_document(config_data(config, absolute=absolute))


def dump_document(data: Mapping[str, Any]) -> str:
    """YAML text of plain data."""
    text: str = yaml.dump(dict(data), Dumper=Dumper, sort_keys=False, allow_unicode=True)
    return text


def config_data(config: RunConfig, *, absolute: bool = False) -> dict[str, Any]:
    """The config as plain data: what a YAML or JSON file holds."""
    data = _Writer(absolute).mapping(config)
    first = {key: data[key] for key in _FIRST if key in data}
    return {**first, **{key: value for key, value in data.items() if key not in first}}


def plain_settings(settings: BaseModel, *, given: bool = False) -> dict[str, Any]:
    """Settings as JSON holds them: all of them, or those that differ from their defaults."""
    return _Writer(absolute=False).mapping(settings, full=not given)


@dataclass(frozen=True)
class _Writer:
    absolute: bool

    def mapping(self, model: BaseModel, *, full: bool = False) -> dict[str, Any]:
        result = {}
        for name, info in type(model).model_fields.items():
            value = getattr(model, name)
            default = info.get_default(call_default_factory=True)
            if value is None or not (full or value != default):
                continue
            if name == "coefficients" and self.absolute:
                value = os.path.abspath(value)
            if name in _FILES and self.absolute:
                value = {key: _absolute(text) for key, text in value.items()}
            result[name] = self.plain(value, full=full or name in _ALWAYS)
        return result

    def plain(self, value: Any, *, full: bool) -> Any:
        if isinstance(value, BaseModel):
            return self.mapping(value, full=full)
        if isinstance(value, ModelRef):
            return _model(value.absolute() if self.absolute else value)
        if isinstance(value, LayerSelection | PurePath):
            return str(value)
        if isinstance(value, (Gradient, Conditional)):
            return plain(value)
        if isinstance(value, Mapping):
            return {key: self.plain(item, full=full) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(item, full=full) for item in value]
        return value


def _absolute(text: tuple[str, ...] | DataRecipe) -> list[str] | DataRecipe:
    """Files by their whole paths (rows in memory have none); of a recipe those that exist, the
    others may be hub ids."""
    if not isinstance(text, DataRecipe):
        return [name if name.startswith("<") else os.path.abspath(name) for name in text]
    inputs = {
        key: tuple(os.path.abspath(p) if os.path.exists(p) else p for p in getattr(text, key))
        for key in ("prompts", "text", "against")
    }
    return text.model_copy(update={"file": os.path.abspath(text.file), **inputs})


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
