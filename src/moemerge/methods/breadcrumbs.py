"""Model breadcrumbs: drop the largest and the smallest changes (Davari and Belilovsky 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._sparsify import Keep, TaskVector, kept_count
from moemerge.methods.linear import plain_sum
from moemerge.methods.method import (
    Density,
    Ignored,
    Lambda,
    Normalize,
    Param,
    PerModel,
    Tensors,
    Weight,
    merge_method,
)
from moemerge.methods.ties import AgreeingSum, Election, Rescale, elected_sum

if TYPE_CHECKING:
    from torch import Tensor

Gamma = Annotated[
    PerModel[float], Param("fraction of largest elements that is dropped", minimum=0, maximum=1)
]


def middle(vector: TaskVector, density: float, gamma: float) -> Keep:
    """Drop the fraction `gamma` of largest magnitudes, then keep the largest of the rest.

    If density + gamma exceeds one, fewer of the largest are dropped: density has precedence.
    """
    kept = kept_count(density, vector.numel)
    outliers = min(int(gamma * vector.numel), vector.numel - kept)
    low, high = vector.largest(kept + outliers), vector.largest(outliers)

    def keep(rows: Tensor, first: int) -> None:
        low.keep(rows, first)
        high.drop(rows, first)

    return keep


@merge_method("breadcrumbs", base="required", sparsify=middle)
def breadcrumbs(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Density = 1.0,
    gamma: Gamma = 0.01,
    normalize: Normalize = False,
    rescale: Rescale = False,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
) -> Tensor:
    """Drop each task vector's largest and smallest elements, add up the rest by weight."""
    return lambda_ * plain_sum(deltas, weights, normalize)


@merge_method("breadcrumbs_ties", base="required", sparsify=middle)
def breadcrumbs_ties(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Density = 1.0,
    gamma: Gamma = 0.01,
    normalize: AgreeingSum = False,
    rescale: Rescale = False,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
    election: Election = "weighted",
) -> Tensor:
    """Drop each task vector's largest and smallest elements, add up the rest by elected sign."""
    return lambda_ * elected_sum(deltas, weights, normalize, election)
