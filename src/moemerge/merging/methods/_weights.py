"""How much each model counts: by its weight, and by the statistics of its own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.errors import ConfigError
from moemerge.merging.method import ModelTensor, Remark, UnitInfo, UnitStatistics, param
from moemerge.merging.methods._arithmetic import weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


ZERO_SUM = 1e-8  # weights whose sum is smaller are not divided by it


@dataclass(frozen=True)
class Weighted:
    """A model's share."""

    weight: float = param(help="this model's share of the sum")


@dataclass(frozen=True)
class Share:
    """How much a model counts where each has a weight of its own accord."""

    weight: float = param(1.0, minimum=0, help="how much this model's errors count")


def shares(weights: Sequence[float], unit: UnitInfo) -> list[float]:
    """Weights that sum to one; refuses those that sum to zero, which would divide by it."""
    total = sum(weights)
    if abs(total) < ZERO_SUM:
        raise ConfigError(
            f"{unit.key}: the weights {', '.join(f'{w:g}' for w in weights)} sum to {total:g} "
            "and cannot be normalized",
            hint="give this tensor weights with another sum, or switch normalization off",
        )
    return [w / total for w in weights]


def params_shares(params: Sequence[Any], options: object, unit: UnitInfo) -> list[float]:
    """`shares` of the models' parameters, as `merge_method` takes it."""
    return shares([p.weight for p in params], unit)


def weight_sum(weights: Sequence[float]) -> float:
    """Σw to divide by; 1 where it vanishes."""
    total = sum(weights)
    return 1.0 if abs(total) < ZERO_SUM else total


def average(inputs: Sequence[ModelTensor], weights: Sequence[float]) -> Tensor:
    """Σ w_i θ_i."""
    return weighted_sum([i.tensor for i in inputs], weights)


def statistics_of(inputs: Sequence[ModelTensor], unit: UnitInfo) -> list[UnitStatistics] | None:
    """Every model's statistics of a unit, or None where it must be averaged.

    Units that no model has statistics of (norms, embeddings) are averaged without a word.
    """
    known = [i.statistics for i in inputs if i.statistics is not None]
    if len(known) == len(inputs):
        return known
    if known:
        lacking = ", ".join(i.name for i in inputs if i.statistics is None)
        unit.remark(Remark.AVERAGED, {"why": f"no statistics of {lacking}"})
    return None
