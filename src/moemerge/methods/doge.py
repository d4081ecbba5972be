"""DOGE: task vectors of one size, corrected for conflicts by gradient steps (Wei et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._sparsify import keep_largest, kept_count
from moemerge.methods._spectra import Spectrum
from moemerge.methods._tensors import weighted_sum
from moemerge.methods.method import Param, Tensors, UnitInfo, merge_method
from moemerge.methods.wudi import adam
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_SUBSPACE = 6  # the shared subspace has a sixth of the directions


@merge_method("doge", base="required", linear_layers=True, time="steps")
def doge(
    deltas: Tensors,
    unit: UnitInfo,
    *,
    eta: Annotated[
        float, Param("size that every model's task vector is scaled to", minimum=0)
    ] = 0.07,
    density: Annotated[
        float,
        Param("fraction of each task vector's elements that is kept", minimum=0, maximum=1),
    ] = 0.3,
    lr: Annotated[float, Param("Adam's step size", above=0)] = 1e-4,
    steps: Annotated[int, Param("Adam's number of steps", minimum=0)] = 400,
) -> Tensor:
    """Add task vectors of equal size, corrected for conflicts outside their shared subspace.

    With l_i = eta / ‖τ_i‖ and P the leading directions of all models' leading left singular
    vectors, Adam minimises Σ_j ‖diag((τ_j - Σ l_i τ_i - Δ Σ l_i) τ_jᵀ)‖² over Δ with gradients
    projected by I - P Pᵀ; the result is θ_0 + Σ l_i (τ_i + Δ) on each model's largest elements.
    The mask is per unit; the paper's is over the whole model.
    """
    scales = [eta / float(delta.norm()) for delta in deltas]
    rank = min(deltas[0].shape)
    share = max(1, rank // len(deltas))
    leading = torch.cat([Spectrum.of(delta, most=share).left for delta in deltas], dim=1)
    P = Spectrum.of(leading, most=rank // _SUBSPACE).left.to(deltas[0].dtype)  # (out, directions)
    merged, total = weighted_sum(deltas, scales), sum(scales)
    # e_j = rowwise ⟨τ_j - Σ l τ - Δ Σ l, τ_j⟩; only the inner product with Δ changes.
    start = [((delta - merged) * delta).sum(1) for delta in deltas]

    def gradient(correction: Tensor) -> Tensor:
        g = torch.zeros_like(correction)
        for delta, e in zip(deltas, start, strict=True):
            residual = e - total * (correction * delta).sum(1)
            g.addcmul_(residual[:, None], delta, value=-2 * total)
        return g.sub_(P @ (P.T @ g))

    correction = adam(gradient, deltas[0], lr, steps, unit.check_stopped)
    result = torch.zeros_like(deltas[0])
    for delta, scale in zip(deltas, scales, strict=True):
        kept = keep_largest(delta, kept_count(density, delta.numel())) != 0
        result += scale * (delta + correction) * kept
    return result
