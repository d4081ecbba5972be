"""Weights of the models, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.errors import ConfigError
from moemerge.merging.method import ModelTensor, Remark, UnitInfo, UnitStatistics, param
from moemerge.merging.methods._arithmetic import weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


ZERO_SUM = 1e-8  # a smaller sum of weights counts as zero


@dataclass(frozen=True)
class Weighted:
    """A model's weight in a sum."""

    weight: float = param(help="this model's share of the sum")


@dataclass(frozen=True)
class ErrorWeight:
    """A model's weight in an objective; all models count the same by default."""

    weight: float = param(1.0, minimum=0, help="how much this model's errors count")


def shares(weights: Sequence[float], unit: UnitInfo) -> list[float]:
    """Return the weights divided by their sum. Refuse weights that sum to zero."""
    total = sum(weights)
    if abs(total) < ZERO_SUM:
        raise ConfigError(
            f"{unit.key}: the weights {', '.join(f'{w:g}' for w in weights)} sum to {total:g} "
            "and cannot be normalized",
            hint="give this tensor weights with another sum, or switch normalization off",
        )
    return [w / total for w in weights]


def params_shares(params: Sequence[Any], options: object, unit: UnitInfo) -> list[float]:
    """Return the `shares` of the models' weights; a `weights` function for `merge_method`."""
    return shares([p.weight for p in params], unit)


def weight_sum(weights: Sequence[float]) -> float:
    """Return Σw as a divisor: 1 if it is zero."""
    total = sum(weights)
    return 1.0 if abs(total) < ZERO_SUM else total


def average(inputs: Sequence[ModelTensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w_i θ_i."""
    return weighted_sum([i.tensor for i in inputs], weights)


def statistics_of(inputs: Sequence[ModelTensor], unit: UnitInfo) -> list[UnitStatistics] | None:
    """Return every model's statistics of a unit, or None if the unit must be averaged.

    If no model has statistics of the unit (norms, embeddings), there is no remark.
    """
    known = [i.statistics for i in inputs if i.statistics is not None]
    if len(known) == len(inputs):
        return known
    if known:
        missing = ", ".join(i.name for i in inputs if i.statistics is None)
        unit.remark(Remark.AVERAGED, {"why": f"no statistics of {missing}"})
    return None
