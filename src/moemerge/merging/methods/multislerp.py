"""Barycentric mean of any number of models on the sphere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import NO_DIRECTION, gram, weighted_sum
from moemerge.merging.methods._weights import Weighted, shares

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MultislerpOptions:
    normalize_weights: bool = param(True, help="divide the weights by their sum")
    eps: float = param(1e-8, minimum=0, help="norms up to this count as zero")


def multislerp_weights(
    params: Sequence[Weighted], options: MultislerpOptions, unit: UnitInfo
) -> Sequence[float]:
    """Return each model's weight, normalised if the options require it."""
    weights = [p.weight for p in params]
    return shares(weights, unit) if options.normalize_weights else weights


@merge_method(
    "multislerp",
    base=BasePolicy.OPTIONAL,
    per_model=Weighted,
    options=MultislerpOptions,
    weights=multislerp_weights,
)
def multislerp(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: MultislerpOptions, unit: UnitInfo
) -> Tensor:
    """Mean direction of the models at their mean length; with a base, of their task vectors.

    (Σ w_i ‖x_i‖) · u / ‖u‖ with u = Σ w_i x_i / ‖x_i‖. Directions that cancel have no mean: then
    the result is the plain Σ w_i x_i.
    """
    tensors = [i.tensor for i in inputs]
    weights = multislerp_weights([i.params for i in inputs], options, unit)
    coefficients = _coefficients(gram(tensors, base), weights, options.eps)
    if base is None:
        return weighted_sum(tensors, coefficients)
    return weighted_sum([base, *tensors], [1 - sum(coefficients), *coefficients])


def _coefficients(g: Tensor, weights: Sequence[float], eps: float) -> list[float]:
    """Return the coefficient of each x_i, from their Gram matrix."""
    norms = g.diagonal().sqrt()
    w = g.new_tensor(weights)
    units = (w / norms).where(norms > eps, 0.0)
    length = math.sqrt(max(0.0, (units @ g @ units).item()))
    if length <= max(eps, NO_DIRECTION * w.abs().sum().item()):
        return list(weights)
    result: list[float] = (units * ((w * norms).sum() / length)).tolist()
    return result
