"""DELLA: drop random elements of task vectors, small ones more often (Deep et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from moemerge.errors import ConfigError
from moemerge.methods._sparsify import Keep, TaskVector, keep_threshold, random_keep
from moemerge.methods.dare import Rescale
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
from moemerge.methods.ties import AgreeingSum, Election, elected_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Epsilon = Annotated[
    PerModel[float],
    Param(
        "keep probability runs from density - epsilon to density + epsilon by rank",
        minimum=0,
        maximum=0.5,
    ),
]
RescaleNorm = Annotated[
    Literal["l1", "probability"],
    Param("restore the L1 norm (mergekit), or divide each by its keep probability (the paper)"),
]
_ROUNDING = 1e-9  # allows 0.85 + 0.15


def check_probabilities(
    density: Sequence[float], epsilon: Sequence[float], **others: object
) -> None:
    for share, reach in zip(density, epsilon, strict=True):
        low, high = share - reach, share + reach
        if share < 1 and (low < -_ROUNDING or high > 1 + _ROUNDING):
            raise ConfigError(
                f"density {share:g} with epsilon {reach:g} makes keep probabilities "
                f"from {low:g} to {high:g}, outside [0, 1]",
                hint="lower epsilon, or set density to 1 to keep everything",
            )


def drop_by_rank(
    vector: TaskVector, density: float, epsilon: float, rescale: bool, rescale_norm: str
) -> Keep:
    """Keep each element with a probability that grows with its magnitude's rank in its row.

    It rises from density - epsilon for the smallest to density + epsilon for the largest. A row of
    one element has the density itself. The framework restores an L1 norm.
    """
    seed, n = vector.seed("della"), vector.columns  # each model has its own mask
    ramp = [density - epsilon + 2 * epsilon * rank / max(1, n - 1) for rank in range(n)]
    by_rank = [min(1.0, max(0.0, p)) for p in ramp] if n > 1 else [density] * n
    thresholds = torch.tensor([keep_threshold(p) for p in by_rank], dtype=torch.int16)
    gains = torch.tensor([1 / p if p > 0 else 0.0 for p in by_rank])
    by_probability = rescale and rescale_norm == "probability"

    def keep(rows: Tensor, first: int) -> None:
        if density >= 1:
            return
        order = ascending_order(rows)
        ranked = random_keep(seed, rows, first, thresholds.to(rows.device)).to(rows.dtype)
        if by_probability:
            ranked *= gains.to(rows)
        rows.mul_(torch.empty_like(rows).scatter_(1, order, ranked))

    return keep


def ascending_order(rows: Tensor) -> Tensor:
    """Return each row's columns by ascending magnitude; ties by column."""
    magnitudes = rows.abs()
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return magnitudes.sort(dim=1, stable=True).indices
    # The bits of non-negative floats have the order of the floats. With the column in the low bits
    # they make one integer per element, which numpy sorts ten times as fast as torch argsorts.
    packed = magnitudes.view(torch.int32).long() << 32 | torch.arange(rows.shape[1])
    packed.numpy().sort(axis=1)
    return packed & ((1 << 32) - 1)


@merge_method("della_linear", base="required", sparsify=drop_by_rank, check=check_probabilities)
def della_linear(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Density = 1.0,
    epsilon: Epsilon = 0.15,
    normalize: Normalize = False,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
    rescale_norm: RescaleNorm = "l1",
) -> Tensor:
    """Drop elements at random, small ones more often, rescale the rest, add up by weight."""
    return lambda_ * plain_sum(deltas, weights, normalize)


@merge_method("della", base="required", sparsify=drop_by_rank, check=check_probabilities)
def della(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Density = 1.0,
    epsilon: Epsilon = 0.15,
    normalize: AgreeingSum = True,
    rescale: Rescale = True,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
    rescale_norm: RescaleNorm = "l1",
    election: Election = "weighted",
) -> Tensor:
    """Drop elements at random, small ones more often, rescale the rest, add by elected sign."""
    return lambda_ * elected_sum(deltas, weights, normalize, election)
