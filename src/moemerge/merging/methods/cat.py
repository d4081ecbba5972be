"""CAT: trim from each task vector what disturbs the other models most (Sun et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, declares, merge_method, param
from moemerge.merging.methods._arithmetic import average, statistics_of
from moemerge.merging.methods._spectra import nearest_orthogonal
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# Relative to a task vector's norm: a smaller trimmed vector is rounding error.
_NOTHING_LEFT = 1e-6


@dataclass(frozen=True)
class CatOptions:
    directions: int = param(2, minimum=0, help="how many directions each model is protected in")
    penalty: float = param(
        0.5, minimum=0, help="weight of a direction's use to its own model against trimming it"
    )
    lambda_: float = param(1.0, key="lambda", help="factor on the sum of the trimmed task vectors")


@merge_method("cat", base=BasePolicy.REQUIRED, options=CatOptions, statistics="gram")
@declares(time="decompositions")
def cat(inputs: Sequence[ModelTensor], base: Tensor, options: CatOptions, unit: UnitInfo) -> Tensor:
    """Trim the outputs of other models' task vectors that disturb a model's own inputs most.

    For each model i, B_i are the leading eigenvectors of Σ_{j≠i} τ_j (G_i - penalty·G_j) τ_jᵀ;
    every τ_j loses the span of the other models' B_i and keeps its size, and the result is
    θ_0 + λ Σ τ_j. Only eigenvectors with positive eigenvalues are trimmed: the others help their
    model more than they disturb. All tensors other than linear layers are averaged.
    """
    statistics = statistics_of(inputs, unit)
    if statistics is None or not base.numel():
        return average(inputs, [1 / len(inputs)] * len(inputs))
    grams = [s.values.double() * (s.tokens / s.domain_tokens) for s in statistics]
    vectors = [i.tensor.double() - base.double() for i in inputs]
    bases = []
    for i in range(len(vectors)):
        unit.check_stopped()
        bases.append(_disturbing(i, vectors, grams, options))
    total = torch.zeros_like(vectors[0])
    for j, vector in enumerate(vectors):
        others = torch.cat([basis for i, basis in enumerate(bases) if i != j] or [vector[:, :0]], 1)
        span = nearest_orthogonal(others)  # all at once, so that order does not matter
        trimmed = vector - span @ (span.T @ vector)
        before, after = torch.linalg.vector_norm(vector), torch.linalg.vector_norm(trimmed)
        if bool(after > _NOTHING_LEFT * before):
            total += trimmed * (before / after)
    return (base + options.lambda_ * total).to(base.dtype).contiguous()


def _disturbing(
    i: int, vectors: Sequence[Tensor], grams: Sequence[Tensor], options: CatOptions
) -> Tensor:
    """Return the output directions, (out, few), that others change most on model i's inputs."""
    out = vectors[i].shape[0]
    total = torch.zeros(out, out, dtype=torch.float64, device=vectors[i].device)
    for j, vector in enumerate(vectors):
        if j != i:
            total += vector @ (grams[i] - options.penalty * grams[j]) @ vector.T
    values, basis = torch.linalg.eigh(total)
    floor = values.abs().max() * out * torch.finfo(values.dtype).eps
    count = min(options.directions, int((values > floor).sum()))
    leading: Tensor = basis[:, out - count :]
    return leading
