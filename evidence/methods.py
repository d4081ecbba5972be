"""Merge methods of the tables: their settings and merge configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moemerge.config.job_settings import CoefficientMethod
from moemerge.errors import UsageError
from moemerge.registry import did_you_mean


@dataclass(frozen=True)
class MethodRecipe:
    """One merge method with its hyperparameters."""

    title: str
    merge_method: str
    weights: tuple[float, ...] = ()  # of two models; more models get equal weights
    each: Mapping[str, float] = field(default_factory=dict)  # parameters of every model
    options: Mapping[str, Any] = field(default_factory=dict)
    wrap: str | None = None  # a wrapper of the method
    coefficients: CoefficientMethod | None = None  # a method that finds the weights from text
    needs_text: bool = False
    needs_general: bool = False  # general text for the base
    needs_base: bool = True
    fewest: int = 2  # models
    most: int | None = None

    def shares(self, count: int) -> Sequence[float]:
        """Return the models' weights; equal ones unless there are two models."""
        return self.weights if len(self.weights) == count else [1 / count] * count


# With the hyperparameters of the paper's appendix.
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

_HALVES = (0.5, 0.5)
_HALF: Mapping[str, float] = {"density": 0.5}
_WHOLE: Mapping[str, float] = {"weight": 1.0}
# All other methods with their defaults, equal weights and half the density; nothing is tuned.
_OTHERS: dict[str, MethodRecipe] = {
    "sum": MethodRecipe("Sum of task vectors", "task_arithmetic", each=_WHOLE),
    "multislerp": MethodRecipe("Multi-SLERP", "multislerp", weights=_HALVES, needs_base=False),
    "nuslerp": MethodRecipe("NuSLERP", "nuslerp", weights=_HALVES, needs_base=False, most=2),
    "karcher": MethodRecipe("Karcher mean", "karcher", needs_base=False),
    "model_stock": MethodRecipe("Model Stock", "model_stock"),
    "dare_linear": MethodRecipe("DARE, linear", "dare_linear", weights=_HALVES, each=_HALF),
    "della": MethodRecipe("DELLA", "della", weights=_HALVES, each=_HALF),
    "della_linear": MethodRecipe("DELLA, linear", "della_linear", weights=_HALVES, each=_HALF),
    "breadcrumbs": MethodRecipe("Breadcrumbs", "breadcrumbs", weights=_HALVES, each=_HALF),
    "breadcrumbs_ties": MethodRecipe(
        "Breadcrumbs, TIES", "breadcrumbs_ties", weights=_HALVES, each=_HALF
    ),
    "sce": MethodRecipe("SCE", "sce"),
    "consensus_ta": MethodRecipe("Consensus TA", "consensus_ta", fewest=3),
    "consensus_ties": MethodRecipe("Consensus TIES", "consensus_ties", fewest=3),
    "pcb": MethodRecipe("PCB", "pcb"),
    "ram": MethodRecipe("RAM", "ram"),
    "ramplus_tl": MethodRecipe("RAM+", "ramplus_tl"),
    "emr": MethodRecipe("EMR, its united model", "emr"),
    "awd": MethodRecipe("AWD", "awd"),
    "tsv": MethodRecipe("TSV-M", "tsv"),
    "iso_c": MethodRecipe("Iso-C", "iso_c"),
    "iso_cts": MethodRecipe("Iso-CTS", "iso_cts"),
    "doge": MethodRecipe("DOGE", "doge"),
    "lore": MethodRecipe("LoRE", "lore", needs_base=False, fewest=3),  # of two: their average
    "wudi_exact": MethodRecipe("WUDI, exact", "wudi", options={"solver": "exact"}),
    "swudi": MethodRecipe("SWUDI", "wudi", options={"solver": "spectral"}),
    "aswudi": MethodRecipe("ASWUDI", "wudi", options={"solver": "adaptive"}),
    "optmerge": MethodRecipe("OptMerge, centred", "wudi", options={"targets": "centred"}),
    "optmerge_leading": MethodRecipe("OptMerge, leading", "wudi", options={"targets": "leading"}),
    "lot": MethodRecipe("LOT", "lot", needs_text=True),
    "slta": MethodRecipe("SLTA", "slta", needs_text=True),
    "cat": MethodRecipe("CAT", "cat", needs_text=True),
    "knots": MethodRecipe("TIES in KnOTS", "ties", weights=_HALVES, each=_HALF, wrap="knots"),
    "svc": MethodRecipe("Sum in SVC", "task_arithmetic", each=_WHOLE, wrap="svc"),
    "aim": MethodRecipe(
        "Sum in AIM", "task_arithmetic", each=_WHOLE, wrap="aim", needs_general=True
    ),
    "acm": MethodRecipe("Sum by ACM", "task_arithmetic", each=_WHOLE, coefficients="acm"),
    "sens": MethodRecipe("Average by Sens", "task_arithmetic", _HALVES, coefficients="sens"),
    "neuron": MethodRecipe("NeuronMerge", "task_arithmetic", each=_WHOLE, coefficients="neuron"),
    "adamerging": MethodRecipe(
        "AdaMerging", "task_arithmetic", each=_WHOLE, coefficients="adamerging"
    ),
}
EVERY: dict[str, MethodRecipe] = {**METHODS, **_OTHERS}


def chosen(names: Sequence[str], default: Mapping[str, MethodRecipe] = METHODS) -> tuple[str, ...]:
    """Return the named methods, or all of `default`, in the order of the table."""
    for name in names:
        if name not in EVERY:
            raise UsageError(
                f"unknown method {name!r}{did_you_mean(name, EVERY)}",
                hint=f"known: {', '.join(EVERY)}",
            )
    return tuple(name for name in EVERY if name in (names or default))


@dataclass(frozen=True)
class MergeFiles:
    """The models and texts of a merge."""

    base: Path
    models: Mapping[str, Path]
    text: Mapping[str, Path]  # of each model
    general: Path | None = None  # for the base
    coefficients: Path | None = None


def merge_config(method: str, files: MergeFiles) -> dict[str, Any]:
    """Return the config that merges the models with `method`."""
    recipe = EVERY[method]
    shares = recipe.shares(len(files.models))
    entries = [
        {
            "model": str(path),
            "name": name,
            "parameters": {**recipe.each, **({"weight": share} if recipe.weights else {})},
        }
        for (name, path), share in zip(files.models.items(), shares, strict=True)
    ]
    config: dict[str, Any] = {"merge_method": recipe.merge_method, "models": entries}
    if recipe.options:
        config["parameters"] = dict(recipe.options)
    if recipe.wrap is not None:
        config["wrap"] = [recipe.wrap]
    if files.coefficients is not None:
        config["coefficients"] = str(files.coefficients)
    if recipe.needs_base:
        config["base_model"] = str(files.base)
    if recipe.needs_text:
        config["data"] = {name: str(files.text[name]) for name in files.models}
    elif recipe.needs_general:
        config["data"] = {files.base.name: str(files.general)}
    return config
