"""SLTA: a coefficient for each model and unit, by least squares (after Dai et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moemerge.methods._tensors import weighted_sum
from moemerge.methods.method import Param, Tensors, UnitInfo, UnitStatistics, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("slta", base="required", statistics="gram")
def slta(
    deltas: Tensors,
    statistics: Sequence[UnitStatistics],
    unit: UnitInfo,
    *,
    ridge: Annotated[
        float, Param("ridge towards equal coefficients, relative to their scale", minimum=0)
    ] = 1e-3,
) -> Tensor:
    """θ_0 + Σ a_i τ_i with the coefficients that answer the models' own inputs best.

    Least squares of Σ_t ‖(Σ a_i τ_i - τ_t) x‖² over the inputs x of every model t: A a = b with
    A_ij = Σ_t tr(τ_i G_t τ_jᵀ) and b_i = Σ_t tr(τ_i G_t τ_tᵀ). It has one unknown per model, so it
    also works for experts that few tokens reach. All tensors other than linear layers are averaged.
    """
    vectors = torch.stack([*deltas]).double()
    n = len(vectors)
    a = torch.zeros(n, n, dtype=torch.float64, device=vectors.device)
    b = torch.zeros(n, dtype=torch.float64, device=vectors.device)
    for t, known in enumerate(statistics):
        unit.check_stopped()
        answers = vectors @ (known.values.double() * (known.tokens / known.domain_tokens))
        inner = answers.flatten(1) @ vectors.flatten(1).T
        a += inner
        b += inner[:, t]
    scale = float(a.diagonal().mean())
    equal = torch.full_like(b, 1 / n)
    if scale <= 0:
        return weighted_sum(deltas, equal.tolist())
    # Always use a ridge: equal models make A singular.
    pull = max(ridge, n * torch.finfo(a.dtype).eps) * scale
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    return weighted_sum(deltas, torch.linalg.solve(a + pull * eye, b + pull * equal).tolist())
