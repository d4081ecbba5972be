"""Write the types that transformers accepts in config.json, for every family.

    python -m tools.config_types

transformers refuses a value of another type, such as 1 for a float. moemerge checks configs without
importing transformers, so the types are kept in a file.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal

import torch
import transformers
from transformers import CONFIG_MAPPING

from moemerge.families.config_check import DENSE
from moemerge.families.config_values import TYPES_FILE
from moemerge.families.families import FAMILIES

NAMES: Mapping[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "str", list: "list", tuple: "list",
    dict: "dict", NoneType: "null", torch.dtype: "str",
}  # fmt: skip


def kinds(annotation: Any) -> set[str]:
    """Return the JSON types that an annotation allows; empty if it allows any."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, UnionType):
        parts = [kinds(part) for part in typing.get_args(annotation)]
        return set().union(*parts) if all(parts) else set()
    if origin is Literal:
        return {NAMES[type(value)] for value in typing.get_args(annotation)}
    name = NAMES.get(origin or annotation)
    return set() if name is None else {name}


def config_types() -> dict[str, dict[str, str]]:
    """Return the types of every key, by the model type."""
    known = {name for family in FAMILIES for name in family.model_types} | DENSE
    found: dict[str, dict[str, str]] = {}
    classes = {name: CONFIG_MAPPING[name] for name in sorted(known & set(CONFIG_MAPPING))}
    for name, whole in list(classes.items()):  # sections without a type are named by their place
        parts = {f"{name}.{key}": part for key, part in whole.sub_configs.items()}
        classes |= {
            key: part for key, part in parts.items() if getattr(part, "model_type", None) == ""
        }
    for model_type, cls in sorted(classes.items()):
        hints = typing.get_type_hints(cls, localns={"torch": torch})
        own = {f.name: sorted(kinds(hints[f.name])) for f in dataclasses.fields(cls)}
        found[model_type] = {name: "|".join(types) for name, types in own.items() if types}
    return found


def main() -> None:
    types = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(own, sort_keys=True)}"
        for name, own in config_types().items()
    )
    version = json.dumps(transformers.__version__)
    TYPES_FILE.write_text(f'{{"transformers": {version}, "types": {{\n{types}\n}}}}\n')


if __name__ == "__main__":
    main()
