"""Fisher merging: average each weight by its Fisher information (Matena and Raffel 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moemerge.methods._tensors import shares, weighted_sum
from moemerge.methods.method import (
    ErrorWeight,
    Param,
    Remark,
    Tensors,
    UnitInfo,
    UnitStatistics,
    merge_method,
)
from moemerge.methods.regmean import check_shares
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("fisher", base="donor", statistics="fisher", check=check_shares)
def fisher(
    tensors: Tensors,
    statistics: Sequence[UnitStatistics],
    unit: UnitInfo,
    weights: ErrorWeight = 1.0,
    *,
    normalize: Annotated[
        bool, Param("information per token, so that longer sequences do not count more")
    ] = True,
    floor: Annotated[
        float,
        Param("smallest Fisher information of a weight, relative to its tensor's mean", above=0),
    ] = 1e-6,
) -> Tensor:
    """Average of the models, each weight by its Fisher information: Σ w_i F_i θ_i / Σ w_i F_i.

    F_i is the diagonal of model i's empirical Fisher information on its own text. If no model's
    loss depends on a weight, the floor makes it the weighted average.
    """
    weights = shares(weights)
    per = [s.sequences / max(1, s.domain_tokens) if normalize else 1.0 for s in statistics]
    means = [float(known.values.mean(dtype=torch.float64)) for known in statistics]
    mean = sum(w * c * m for w, c, m in zip(weights, per, means, strict=True))
    if not mean >= torch.finfo(torch.float32).tiny:
        unit.remark(Remark.AVERAGED, {"why": "no model's loss depends on it"})
        return weighted_sum(tensors, weights)
    unvisited = {
        name: known.tokens
        for name, known, m, weight in zip(unit.models, statistics, means, weights, strict=True)
        if m == 0 and weight > 0
    }
    if unvisited:
        unit.remark(Remark.UNVISITED, unvisited)
    # As θ_1 plus a correction, which is exact if the models agree.
    first = tensors[0]
    total, correction = torch.zeros_like(first), torch.zeros_like(first)
    for tensor, known, c, weight in zip(tensors, statistics, per, weights, strict=True):
        information = weight * (known.values * (c / mean)).clamp_min(floor)
        total += information
        correction += information * (tensor - first)
    return first + correction / total
