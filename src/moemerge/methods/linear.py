"""Sums of models: linear averages, task arithmetic (Ilharco et al. 2023) and passthrough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moemerge.methods._tensors import ZERO_SUM, shares, weighted_sum
from moemerge.methods.method import (
    Ignored,
    Lambda,
    Normalize,
    Param,
    PerModel,
    Tensors,
    Weight,
    merge_method,
)

if TYPE_CHECKING:
    from torch import Tensor


def check_shares(weights: Sequence[float], normalize: bool) -> None:
    if normalize:
        shares(weights)


@merge_method("linear", base="member", elementwise=True, check=check_shares)
def linear(tensors: Tensors, weights: Weight, *, normalize: Normalize = True) -> Tensor:
    """Weighted average of the models: Σ w_i θ_i / Σ w_i."""
    return weighted_sum(tensors, shares(weights) if normalize else weights)


@merge_method("task_arithmetic", base="required", elementwise=True)
def task_arithmetic(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Annotated[
        PerModel[float], Param("accepted for mergekit's configs; has no effect here")
    ] = 1.0,
    normalize: Normalize = False,
    rescale: Ignored = False,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
) -> Tensor:
    """Add the weighted sum of task vectors to the base: θ_0 + λ Σ w_i (θ_i - θ_0)."""
    return lambda_ * plain_sum(deltas, weights, normalize)


def plain_sum(deltas: Tensors, weights: Sequence[float], normalize: bool) -> Tensor:
    """Return Σ w_i δ_i [/ Σ w_i, if it is not zero]."""
    total = sum(weights)
    factor = 1 / total if normalize and abs(total) >= ZERO_SUM else 1.0
    return weighted_sum(deltas, [factor * weight for weight in weights])


@merge_method("passthrough", base="member", models=(1, 1), elementwise=True)
def passthrough(
    tensors: Tensors,
    *,
    scale: Annotated[PerModel[float | None], Param("factor on the tensor")] = None,
) -> Tensor:
    """Pass one model's tensor through, times `scale` if given."""
    return tensors[0] if scale[0] is None else tensors[0] * scale[0]
