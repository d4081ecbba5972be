"""What there is: a model, from its headers alone; merge methods; model families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moemerge.architectures.describe import Description, describe
from moemerge.architectures.families import families
from moemerge.checkpoint import Checkpoint
from moemerge.config.parameters import REQUIRED, BasePolicy, MethodSchema, WrapperSchema


def inspect(model: str | Path) -> Description:
    """What a model folder or hub model is, from its headers alone."""
    checkpoint = Checkpoint.open(model)
    return describe(checkpoint.config, checkpoint.tensors)


def config_schema() -> dict[str, Any]:
    """A JSON schema of config files, with the methods that there are: for editors."""
    from moemerge.config.json_schema import config_schema

    return config_schema({**wrapper_schemas(), **method_schemas()})


def method_schemas() -> dict[str, MethodSchema]:
    """What every merge method declares, by its name."""
    from moemerge import merging

    merging.load_plugins()
    return {name: merging.METHODS.get(name).schema for name in sorted(merging.METHODS)}


def wrapper_schemas() -> dict[str, WrapperSchema]:
    """What every wrapper declares, by its name."""
    from moemerge import merging

    merging.load_plugins()
    return {name: merging.WRAPPERS.get(name).schema for name in sorted(merging.WRAPPERS)}


def list_wrappers() -> list[dict[str, Any]]:
    """Every wrapper with its parameters."""
    return [
        {
            "wrapper": name,
            "what_it_does": schema.summary,
            "statistics": schema.statistics,
            "options": _parameters(schema, per_model=False),
        }
        for name, schema in wrapper_schemas().items()
    ]


# The groups of `ls methods`, in their order.
AVERAGES = "without task vectors: models and, where one is given, the base"
CHANGES = "changes against a base, in passes over the weights"
MATRICES = "matrix by matrix: decompositions of each, or steps"
INFORMED = "from statistics of each model's own text"


def _group(schema: MethodSchema) -> str:
    if schema.statistics is not None:
        return INFORMED
    if schema.time != "passes":
        return MATRICES
    return CHANGES if schema.base is BasePolicy.REQUIRED else AVERAGES


def list_methods() -> list[dict[str, Any]]:
    """Every merge method with its parameters and what it needs, group by group."""
    from moemerge import merging

    order = (AVERAGES, CHANGES, MATRICES, INFORMED)
    schemas = sorted(method_schemas().items(), key=lambda item: order.index(_group(item[1])))
    return [
        {
            "method": name,
            "group": _group(schema),
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
        for family in families()
    ]
