"""OPCM: add task vectors one after another without their overlap (Tang et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._spectra import Spectrum
from moemerge.methods.method import Lambda, Param, Tensors, UnitInfo, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("opcm", base="required", linear_layers=True, time="decompositions")
def opcm(
    deltas: Tensors,
    unit: UnitInfo,
    *,
    lambda_: Lambda = 1.0,
    alpha: Annotated[
        float,
        Param(
            "share of the singular values' sum that protected directions hold at most",
            minimum=0,
            maximum=1,
        ),
    ] = 0.5,
) -> Tensor:
    """Add task vectors one after another, each without its overlap with the sum so far.

    With the sum so far Δ = U diag(s) Vᵀ, the next τ loses the part U M Vᵀ: M is Uᵀ τ V in the block
    of the leading directions and on the diagonal, 0 elsewhere. The result is
    θ_0 + λ Δ mean(‖τ_i‖) / ‖Δ‖: the paper's factors of single steps cancel.
    """
    if len(deltas) < 2:
        return lambda_ * deltas[0]
    first, *others = (delta.double() for delta in deltas)
    total = first
    for delta in others:
        unit.check_stopped()
        known = Spectrum.of(total)
        sums = known.values.cumsum(0)
        leading = int((sums <= alpha * sums[-1]).sum())
        inside = known.left.T @ delta @ known.right
        overlap = torch.diag(inside.diagonal())
        overlap[:leading, :leading] = inside[:leading, :leading]
        total = total + delta - known.left @ overlap @ known.right.T
    size = sum(float(delta.norm()) for delta in (first, *others)) / len(deltas)
    return lambda_ * size / float(total.norm()) * total
