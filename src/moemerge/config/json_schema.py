"""The form of a config as a JSON schema, from which editors complete and check while one types.

It knows less than `load_config`: what one key means for another is said there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from moemerge.config.fields import ValueForm
from moemerge.config.parameters import MethodSchema, WrapperSchema
from moemerge.config.schema import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NULL = {"type": "null"}


def config_schema(schemas: Mapping[str, MethodSchema]) -> dict[str, Any]:
    """A JSON schema of config files, with the methods and wrappers that there are."""
    schema = RunConfig.model_json_schema()
    parts = schema["$defs"]
    for part in (schema, *parts.values()):
        del part["title"]
        properties = part["properties"]
        for name, form in properties.items():
            if name == "merge_method":
                form["enum"] = sorted(n for n, s in schemas.items() if not _wraps(s))
            elif name == "wrapper":
                form["enum"] = sorted(n for n, s in schemas.items() if _wraps(s))
            elif name == "parameters":
                del form["type"], form["additionalProperties"]
                form["$ref"] = "#/$defs/Parameters"
        part["properties"] = {name: _or_null(form) for name, form in properties.items()}
    parts["Parameters"] = _parameters(schemas)
    parts["Value"] = TypeAdapter(ValueForm).json_schema()
    return {"$schema": DIALECT, "title": "moemerge config", **schema}


def _wraps(schema: MethodSchema) -> bool:
    return isinstance(schema, WrapperSchema)


def _parameters(schemas: Mapping[str, MethodSchema]) -> dict[str, Any]:
    """Every parameter of every method by name, with what the methods say of it."""
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
    """A key that is left empty means its default."""
    described = {"description": form["description"]} if "description" in form else {}
    rest = {k: v for k, v in form.items() if k not in ("description", "default", "title")}
    forms = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return {**described, "anyOf": [*(f for f in forms if f != NULL), NULL]}
