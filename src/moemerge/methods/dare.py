"""DARE: drop random elements of task vectors and rescale the rest (Yu et al. 2024, "Language models
are Super Mario").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from moemerge.methods._sparsify import Keep, TaskVector, keep_threshold, random_keep
from moemerge.methods.linear import plain_sum
from moemerge.methods.method import (
    Density,
    Ignored,
    Lambda,
    Normalize,
    Param,
    Tensors,
    Weight,
    merge_method,
)
from moemerge.methods.ties import AgreeingSum, Election, elected_sum

if TYPE_CHECKING:
    from torch import Tensor

Rescale = Annotated[bool, Param("rescale the kept elements to the original size")]
RescaleNorm = Annotated[
    Literal["l1", "probability"],
    Param("size to restore: the measured L1 norm (mergekit), or its expectation (the paper)"),
]


def drop(vector: TaskVector, density: float, rescale: bool, rescale_norm: str) -> Keep:
    """Keep each element with probability `density`. The framework restores an L1 norm."""
    seed = vector.seed("dare")  # each model has its own mask
    gain = 1 / density if rescale and rescale_norm == "probability" and density > 0 else 1.0

    def keep(rows: Tensor, first: int) -> None:
        if density < 1:
            rows.mul_(random_keep(seed, rows, first, keep_threshold(density)))
            rows.mul_(gain)

    return keep


@merge_method("dare_linear", base="required", sparsify=drop)
def dare_linear(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Density = 1.0,
    normalize: Normalize = False,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
    rescale_norm: RescaleNorm = "l1",
) -> Tensor:
    """Drop random elements of each task vector, rescale the rest, add them up by weight."""
    return lambda_ * plain_sum(deltas, weights, normalize)


@merge_method("dare_ties", base="required", sparsify=drop)
def dare_ties(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Density = 1.0,
    normalize: AgreeingSum = False,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
    rescale_norm: RescaleNorm = "l1",
    election: Election = "weighted",
) -> Tensor:
    """Drop random elements of each task vector, rescale the rest, add up by elected sign."""
    return lambda_ * elected_sum(deltas, weights, normalize, election)
