"""Weighted average of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import weighted_sum
from moemerge.merging.methods._weights import Weighted, shares

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LinearOptions:
    normalize: bool = param(True, help="divide by the sum of the weights")


def linear_shares(
    params: Sequence[Weighted], options: LinearOptions, unit: UnitInfo
) -> Sequence[float]:
    """Return each model's weight, normalised if the options require it."""
    weights = [p.weight for p in params]
    return shares(weights, unit) if options.normalize else weights


@merge_method(
    "linear",
    base=BasePolicy.MEMBER,
    per_model=Weighted,
    options=LinearOptions,
    elementwise=True,
    weights=linear_shares,
)
def linear(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: LinearOptions, unit: UnitInfo
) -> Tensor:
    """Weighted average of the models: Σ w_i θ_i / Σ w_i."""
    weights = linear_shares([i.params for i in inputs], options, unit)
    return weighted_sum([i.tensor for i in inputs], weights)
