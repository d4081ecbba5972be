"""What there is: a model, from its headers alone; merge methods; model families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moemerge.architectures.describe import Description, describe
from moemerge.architectures.families import FAMILIES
from moemerge.checkpoint import Checkpoint
from moemerge.config.parameters import REQUIRED, MethodSchema


def inspect(model: str | Path) -> Description:
    """What a model folder or hub model is, from its headers alone."""
    checkpoint = Checkpoint.open(model)
    return describe(checkpoint.config, checkpoint.tensors)


def list_methods() -> list[dict[str, Any]]:
    """Every merge method with its parameters."""
    from moemerge import merging

    merging.load_plugins()
    rows = []
    for name in sorted(merging.METHODS):
        schema = merging.METHODS.get(name).schema
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
