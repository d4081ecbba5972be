"""A config back as YAML, and the form of config files as a JSON schema.

Reading the YAML again returns the same config. Editors complete and check configs by the schema; it
knows less than `load_config`, which also checks how keys depend on each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, TypeAdapter

from moemerge.config.fields import LayerSelection, ValueForm
from moemerge.config.models import ModelRef, named_in
from moemerge.config.parameter_values import Conditional, Gradient, plain
from moemerge.config.parameters import MethodSchema, WrapperSchema
from moemerge.config.schema import REPAIRS, RunConfig
from moemerge.config.text_settings import DataRecipe
from moemerge.config.yaml_lines import dump_document

# Blocks that are written with their defaults, which a later version may change.
_ALWAYS = tuple(repair.key for repair in REPAIRS)
# Fields that are written with their defaults: `tokenizer: {}` would hide the union.
_EXPLICIT = ("source",)
_FIRST = ("merge_method", "base_model")
_FILES = ("data", "base_data", "check", "statistics")  # whose values are file names


def dump_config(config: RunConfig, folder: Path | None = None) -> str:
    """Return a config as YAML text, with all settings of a repair.

    With `folder`, paths are relative to the folder that the config is written to.
    """
    return dump_document(config_data(config, folder))


def config_data(config: BaseModel, folder: Path | None = None) -> dict[str, Any]:
    """Return the config as plain data, as a YAML or JSON file (in `folder`) contains it."""
    data = _mapping(config, folder=folder)
    first = {key: data[key] for key in _FIRST if key in data}
    return {**first, **{key: value for key, value in data.items() if key not in first}}


def plain_settings(settings: BaseModel, *, given: bool = False) -> dict[str, Any]:
    """Return settings as JSON data: all of them, or those that differ from their defaults."""
    return _mapping(settings, full=not given)


def _mapping(model: BaseModel, *, folder: Path | None = None, full: bool = False) -> dict[str, Any]:
    """Return the fields that differ from their defaults or are in `_EXPLICIT`.

    With `full`, return all fields that have a value.
    """
    result = {}
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        default = info.get_default(call_default_factory=True)
        if value is None or not (full or name in _EXPLICIT or value != default):
            continue
        if folder is not None and name == "coefficients":
            value = named_in(folder, value)
        if folder is not None and name in _FILES:
            value = (
                {key: _files(folder, text) for key, text in value.items()}
                if isinstance(value, Mapping)
                else _files(folder, value)
            )
        result[name] = _plain(value, folder=folder, full=full or name in _ALWAYS)
    return result


def _plain(value: Any, *, folder: Path | None, full: bool) -> Any:
    if isinstance(value, BaseModel):
        return _mapping(value, folder=folder, full=full)
    if isinstance(value, ModelRef):
        return _model(value if folder is None else value.as_named_in(folder))
    if isinstance(value, LayerSelection | PurePath):
        return str(value)
    if isinstance(value, (Gradient, Conditional)):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, folder=folder, full=full) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, folder=folder, full=full) for item in value]
    return value


def _files(folder: Path, text: tuple[str, ...] | DataRecipe) -> list[str] | DataRecipe:
    """Return files as a config in `folder` names them. In a recipe only existing ones are changed:
    others may be hub ids."""
    if not isinstance(text, DataRecipe):
        return [name if name.startswith("<") else named_in(folder, name) for name in text]
    inputs = {
        key: tuple(named_in(folder, path, existing=True) for path in getattr(text, key))
        for key in ("prompts", "text", "against")
    }
    return text.model_copy(update={"file": named_in(folder, text.file), **inputs})


def _model(ref: ModelRef) -> Any:
    """Return text, or mergekit's mapping if the text would be misread."""
    parts = (ref.path, ref.revision, ref.lora, ref.lora_revision)
    clear = not any(mark in part for part in parts if part for mark in "@+#")
    if clear and not (ref.lora or "").startswith("."):  # only a whole text's path is located
        return str(ref)
    side = {"path": ref.path, "revision": ref.revision}
    result: dict[str, Any] = {"model": {k: v for k, v in side.items() if v is not None}}
    if ref.lora is not None:
        lora = {"path": ref.lora, "revision": ref.lora_revision, "layout": ref.lora_layout}
        result["lora"] = {k: v for k, v in lora.items() if v is not None}
    return result


# --- JSON schema --------------------------------------------------------------------------------


DIALECT = "https://json-schema.org/draft/2020-12/schema"
NULL = {"type": "null"}


def config_schema(schemas: Mapping[str, MethodSchema]) -> dict[str, Any]:
    """Return a JSON schema of config files, with all methods and wrappers."""
    wrappers = {name for name, one in schemas.items() if isinstance(one, WrapperSchema)}
    schema = RunConfig.model_json_schema()
    parts = schema["$defs"]
    for part in (schema, *parts.values()):
        del part["title"]
        properties = part["properties"]
        for name, form in properties.items():
            if name == "merge_method":
                form["enum"] = sorted(schemas.keys() - wrappers)
            elif name == "wrapper":
                form["enum"] = sorted(wrappers)
            elif name == "parameters":
                del form["type"], form["additionalProperties"]
                form["$ref"] = "#/$defs/Parameters"
        part["properties"] = {name: _or_null(form) for name, form in properties.items()}
    schema["properties"]["name"] = {
        "type": "string",
        "description": "name of one of several merges",
    }
    parts["Parameters"] = _parameters(schemas)
    parts["Value"] = TypeAdapter(ValueForm).json_schema()
    return {"$schema": DIALECT, "title": "moemerge config", **schema}


def _parameters(schemas: Mapping[str, MethodSchema]) -> dict[str, Any]:
    """Return every parameter of every method by name, with the methods' descriptions."""
    helps: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for method in sorted(schemas):
        for spec in schemas[method].parameters:
            helps[spec.name][spec.help].append(method)
    properties = {
        name: {
            "$ref": "#/$defs/Value",
            "description": "; ".join(f"{text} ({', '.join(m)})" for text, m in texts.items()),
        }
        for name, texts in sorted(helps.items())
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _or_null(form: dict[str, Any]) -> dict[str, Any]:
    """Allow null, which means the default."""
    described = {"description": form["description"]} if "description" in form else {}
    rest = {k: v for k, v in form.items() if k not in ("description", "default", "title")}
    forms = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return {**described, "anyOf": [*(f for f in forms if f != NULL), NULL]}
