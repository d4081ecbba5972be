"""DOGE: task arithmetic with a shared correction outside the shared subspace (Wei et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import flat
from moemerge.merging.methods._selection import keep_largest_, kept_count
from moemerge.merging.methods._spectra import Spectrum
from moemerge.merging.methods._task_vectors import (
    OthersOptions,
    changes,
    is_linear,
    merge_others,
)
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_SUBSPACE = 6  # the shared subspace has a sixth of the directions
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's usual constants


@dataclass(frozen=True)
class DogeOptions(OthersOptions):
    eta: float = param(0.07, minimum=0, help="size that every model's task vector is scaled to")
    density: float = param(
        0.3, minimum=0, maximum=1, help="fraction of each task vector's elements that is kept"
    )
    lr: float = param(1e-4, minimum=0, exclusive_minimum=True, help="Adam's step size")
    steps: int = param(400, minimum=0, help="Adam's number of steps")


@merge_method("doge", base=BasePolicy.REQUIRED, options=DogeOptions, time="steps")
def doge(
    inputs: Sequence[ModelTensor], base: Tensor, options: DogeOptions, unit: UnitInfo
) -> Tensor:
    """Add task vectors of equal size, corrected for conflicts outside their shared subspace.

    With l_i = eta / ‖τ_i‖ and P the leading directions of all models' leading left singular
    vectors, Adam minimises Σ_j ‖diag((τ_j - Σ l_i τ_i - Δ Σ l_i) τ_jᵀ)‖² over Δ with gradients
    projected by I - P Pᵀ; the result is θ_0 + Σ l_i (τ_i + Δ) on each model's largest elements.
    The mask is per unit; the paper's is over the whole model.
    """
    if not is_linear(base, unit):
        return merge_others(inputs, base, options)
    vectors = changes(inputs, base)
    if not vectors:
        return base.clone(memory_format=torch.contiguous_format)
    scales = [options.eta / float(torch.linalg.vector_norm(v)) for v in vectors]
    correction = _correction(vectors, scales, options, unit)
    result = base.clone(memory_format=torch.contiguous_format)
    for vector, scale in zip(vectors, scales, strict=True):
        kept = flat(vector).clone()
        keep_largest_(kept, kept_count(options.density, kept.numel()))
        mask = (kept != 0).view(base.shape)
        result += scale * (vector + correction) * mask
    return result


def _correction(
    vectors: Sequence[Tensor], scales: Sequence[float], options: DogeOptions, unit: UnitInfo
) -> Tensor:
    """Return Δ, (out, in), after `steps` Adam steps from 0."""
    P = _shared_subspace(vectors).to(vectors[0].dtype)  # (out, directions)
    total = sum(scales)
    merged = sum(s * v for s, v in zip(scales, vectors, strict=True))
    # e_j = rowwise ⟨τ_j - Σ l τ - Δ Σ l, τ_j⟩; only the inner product with Δ changes.
    start = [((v - merged) * v).sum(1) for v in vectors]
    delta, m, v2 = (torch.zeros_like(vectors[0]) for _ in range(3))
    for step in range(1, options.steps + 1):
        unit.check_stopped()
        gradient = torch.zeros_like(delta)
        for vector, e in zip(vectors, start, strict=True):
            residual = e - total * (delta * vector).sum(1)
            gradient.addcmul_(residual[:, None], vector, value=-2 * total)
        gradient -= P @ (P.T @ gradient)
        m.lerp_(gradient, 1 - _BETA1)
        v2.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        divisor = v2.sqrt().div_(math.sqrt(1 - _BETA2**step)).add_(_EPS)
        delta.addcdiv_(m, divisor, value=-options.lr / (1 - _BETA1**step))
    return delta


def _shared_subspace(vectors: Sequence[Tensor]) -> Tensor:
    rank = min(vectors[0].shape)
    share = max(1, rank // len(vectors))
    leading = torch.cat([Spectrum.of(v, most=share).left for v in vectors], dim=1)
    return Spectrum.of(leading, most=rank // _SUBSPACE).left
