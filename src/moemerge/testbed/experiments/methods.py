"""The merges of the paper's tables, as configs of the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moemerge.errors import UsageError
from moemerge.registry import did_you_mean


@dataclass(frozen=True)
class MethodRecipe:
    """One merge method with the hyperparameters of the paper's appendix."""

    title: str
    merge_method: str
    weights: tuple[float, ...] = ()  # of two models; more models share equally
    each: Mapping[str, float] = field(default_factory=dict)  # parameters of every model
    needs_text: bool = False
    needs_base: bool = True

    def shares(self, count: int) -> Sequence[float]:
        """The models' weights: the paper's for two, equal ones otherwise."""
        return self.weights if len(self.weights) == count else [1 / count] * count


METHODS: dict[str, MethodRecipe] = {
    "average": MethodRecipe("Weight averaging", "linear", weights=(0.5, 0.5), needs_base=False),
    "ties": MethodRecipe("TIES", "ties", weights=(0.4, 0.6), each={"density": 0.6}),
    "dare": MethodRecipe("DARE", "dare_ties", weights=(0.3, 0.7), each={"density": 0.4}),
    "wudi": MethodRecipe("WUDI", "wudi"),
    "fisher": MethodRecipe(
        "Fisher", "fisher", weights=(0.5, 0.5), needs_text=True, needs_base=False
    ),
    "regmean": MethodRecipe("RegMean", "regmean", needs_text=True, needs_base=False),
}
AVERAGE = "average"


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The methods asked for (all of them where none is named), in the table's order."""
    for name in names:
        if name not in METHODS:
            raise UsageError(
                f"unknown method {name!r}{did_you_mean(name, METHODS)}",
                hint=f"known: {', '.join(METHODS)}",
            )
    return tuple(name for name in METHODS if not names or name in names)


def merge_config(
    method: str,
    base: Path,
    models: Mapping[str, Path],
    text: Mapping[str, Path],
) -> dict[str, Any]:
    """The config that merges `models` by `method`; `text` is each model's, used where needed."""
    recipe = METHODS[method]
    shares = recipe.shares(len(models))
    entries = [
        {
            "model": str(path),
            "name": name,
            "parameters": {**recipe.each, **({"weight": share} if recipe.weights else {})},
        }
        for (name, path), share in zip(models.items(), shares, strict=True)
    ]
    config: dict[str, Any] = {"merge_method": recipe.merge_method, "models": entries}
    if recipe.needs_base:
        config["base_model"] = str(base)
    if recipe.needs_text:
        config["data"] = {name: str(text[name]) for name in models}
    return config


def graft_config(weights: Path, routers: Path) -> dict[str, Any]:
    """The config of a model with all of one model's weights but the other's routers."""
    return {
        "merge_method": "linear",
        "models": [
            {"model": str(weights), "name": "weights", "parameters": {"weight": 1.0}},
            {"model": str(routers), "name": "routers", "parameters": {"weight": 0.0}},
        ],
        "router": {"keep": "routers"},
    }
