"""Consensus merging: keep what several models find important (Wang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moemerge.methods._sparsify import keep_largest, kept_count
from moemerge.methods._tensors import weighted_sum
from moemerge.methods.method import Density, Lambda, Param, PerModel, Tensors, Weight, merge_method
from moemerge.methods.ties import elected_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Threshold = Annotated[
    PerModel[float],
    Param("an element matters to this model where |δ_i| > threshold·|Δ - δ_i|", minimum=0),
]
Enough = Annotated[int, Param("how many models an element must matter to", minimum=1)]


@merge_method("consensus_ta", base="required", models=(2, None), elementwise=True)
def consensus_ta(
    deltas: Tensors,
    weights: Weight = 1.0,
    *,
    threshold: Threshold = 0.4,
    k: Enough = 2,
    lambda_: Lambda = 1.0,
) -> Tensor:
    """Keep the elements of the task vectors' sum that at least k models find important.

    With Δ = Σ w_i δ_i, element by element: θ_0 + λ Δ·[#{i : |δ_i| > t_i |Δ - δ_i|} ≥ k]. Intended
    for three models or more. With two models, k = 2 keeps elements that both changed similarly.
    """
    return lambda_ * _where_agreed(weighted_sum(deltas, weights), deltas, threshold, k)


@merge_method("consensus_ties", base="required", models=(2, None))
def consensus_ties(
    deltas: Tensors,
    weights: Weight = 1.0,
    *,
    density: Density = 0.2,
    threshold: Threshold = 0.4,
    k: Enough = 2,
    lambda_: Lambda = 1.0,
) -> Tensor:
    """As `consensus_ta`, with the task vectors merged by TIES (trimmed, signs elected, summed)."""
    trimmed = [
        keep_largest(delta, kept_count(share, delta.numel()))
        for delta, share in zip(deltas, density, strict=True)
    ]
    total = elected_sum(trimmed, weights, normalize=False)
    return lambda_ * _where_agreed(total, deltas, threshold, k)


def _where_agreed(
    total: Tensor, deltas: Tensors, thresholds: Sequence[float], enough: int
) -> Tensor:
    """Return the elements of the total that enough models find important."""
    votes = torch.zeros_like(total, dtype=torch.int8)
    for delta, threshold in zip(deltas, thresholds, strict=True):
        votes += delta.abs() > threshold * (total - delta).abs()
    return torch.where(votes >= enough, total, 0.0)
