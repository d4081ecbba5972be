"""CAT merging: trim what disturbs other models' inputs (Sun et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moemerge.methods._spectra import nearest_orthogonal
from moemerge.methods.method import Param, Tensors, UnitInfo, UnitStatistics, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Relative to a task vector's norm: a smaller trimmed vector is rounding error.
_NOTHING_LEFT = 1e-6


@merge_method("cat", base="required", statistics="gram", time="decompositions")
def cat(
    deltas: Tensors,
    statistics: Sequence[UnitStatistics],
    unit: UnitInfo,
    *,
    directions: Annotated[
        int, Param("how many directions each model is protected in", minimum=0)
    ] = 2,
    penalty: Annotated[
        float,
        Param("weight of a direction's use to its own model against trimming it", minimum=0),
    ] = 0.5,
    lambda_: Annotated[float, Param("factor on the sum of the trimmed task vectors")] = 1.0,
) -> Tensor:
    """Trim the outputs of other models' task vectors that disturb a model's own inputs most.

    For each model i, B_i are the leading eigenvectors of Σ_{j≠i} τ_j (G_i - penalty·G_j) τ_jᵀ;
    every τ_j loses the span of the other models' B_i and keeps its size, and the result is
    θ_0 + λ Σ τ_j. Only eigenvectors with positive eigenvalues are trimmed: the others help their
    model more than they disturb. All tensors other than linear layers are averaged.
    """
    grams = [known.values.double() * (known.tokens / known.domain_tokens) for known in statistics]
    vectors = [delta.double() for delta in deltas]
    out = vectors[0].shape[0]
    bases = []  # of each model i: the output directions, (out, few), that others disturb most
    for i, own in enumerate(grams):
        unit.check_stopped()
        disturbance = torch.zeros(out, out, dtype=torch.float64, device=own.device)
        for j, (vector, other) in enumerate(zip(vectors, grams, strict=True)):
            if j != i:
                disturbance += vector @ (own - penalty * other) @ vector.T
        values, basis = torch.linalg.eigh(disturbance)
        floor = values.abs().max() * out * torch.finfo(values.dtype).eps
        bases.append(basis[:, out - min(directions, int((values > floor).sum())) :])
    total = torch.zeros_like(vectors[0])
    for j, vector in enumerate(vectors):
        others = torch.cat([basis for i, basis in enumerate(bases) if i != j] or [vector[:, :0]], 1)
        span = nearest_orthogonal(others)  # all at once, so that order does not matter
        trimmed = vector - span @ (span.T @ vector)
        before, after = torch.linalg.vector_norm(vector), torch.linalg.vector_norm(trimmed)
        if bool(after > _NOTHING_LEFT * before):
            total += trimmed * (before / after)
    return lambda_ * total
