"""Consensus merging: keep what at least k models find important (Wang et al. 2024, TALL-masks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import chunks, flat
from moemerge.merging.methods._sparsify import trim_
from moemerge.merging.methods._task_vectors import (
    Thinned,
    add_elected,
    flat_difference,
    task_vector,
)
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ConsensusParams:
    weight: float = param(1.0, help="this model's share of the sum")
    threshold: float = param(
        0.4, minimum=0, help="an element matters to this model where |δ_i| > threshold·|Δ - δ_i|"
    )


@dataclass(frozen=True)
class ConsensusTiesParams(Thinned):
    weight: float = param(1.0, help="this model's share of the sum")
    density: float = param(
        0.2, minimum=0, maximum=1, help="fraction of the task vector's elements that is kept"
    )
    threshold: float = param(
        0.4, minimum=0, help="an element matters to this model where |δ_i| > threshold·|Δ - δ_i|"
    )


@dataclass(frozen=True)
class ConsensusOptions:
    k: int = param(2, minimum=1, help="how many models an element must matter to")
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")


@merge_method(
    "consensus_ta",
    base=BasePolicy.REQUIRED,
    per_model=ConsensusParams,
    options=ConsensusOptions,
    models=(2, None),
    elementwise=True,
)
def consensus_ta(
    inputs: Sequence[ModelTensor], base: Tensor, options: ConsensusOptions, unit: UnitInfo
) -> Tensor:
    """Keep the elements of the task vectors' sum that at least k models find important.

    With Δ = Σ w_i δ_i, element by element: θ_0 + λ Δ·[#{i : |δ_i| > t_i |Δ - δ_i|} ≥ k]. Intended
    for three models or more. With two models, k = 2 keeps elements that both changed similarly.
    """
    vectors = [task_vector(i, base) for i in inputs]
    total = torch.zeros_like(vectors[0].values)
    for vector in vectors:
        total.add_(vector.values, alpha=vector.weight)
    deltas = [v.values for v in vectors]
    return _where_agreed(base, total, deltas, [i.params.threshold for i in inputs], options)


@merge_method(
    "consensus_ties",
    base=BasePolicy.REQUIRED,
    per_model=ConsensusTiesParams,
    options=ConsensusOptions,
    models=(2, None),
)
def consensus_ties(
    inputs: Sequence[ModelTensor], base: Tensor, options: ConsensusOptions, unit: UnitInfo
) -> Tensor:
    """As `consensus_ta`, with the task vectors merged by TIES (trimmed, signs elected, summed)."""
    vectors = [task_vector(i, base) for i in inputs]
    for vector, model in zip(vectors, inputs, strict=True):
        trim_(vector, model.params.density, rescale=False)
    total = flat(add_elected(torch.zeros_like(base), vectors, normalize=False, factor=1.0))
    deltas = [flat_difference(i.tensor, base) for i in inputs]  # masks use untrimmed vectors
    return _where_agreed(base, total, deltas, [i.params.threshold for i in inputs], options)


def _where_agreed(
    base: Tensor,
    total: Tensor,
    deltas: Sequence[Tensor],
    thresholds: Sequence[float],
    options: ConsensusOptions,
) -> Tensor:
    """Return θ_0 + λ Δ for elements that enough models find important. Only `base` is not flat."""
    origin = flat(base)
    out = torch.empty_like(origin)
    for at in chunks(origin):
        votes = torch.zeros_like(origin[at], dtype=torch.int8)
        for delta, threshold in zip(deltas, thresholds, strict=True):
            votes += delta[at].abs() > threshold * (total[at] - delta[at]).abs()
        kept = torch.where(votes >= options.k, total[at], 0.0)
        torch.add(origin[at], kept, alpha=options.lambda_, out=out[at])
    return out.view(base.shape)
