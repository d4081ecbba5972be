"""Isotropic merging: equally strong singular directions (Marczak et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._spectra import Spectrum, nearest_orthogonal
from moemerge.methods.method import Lambda, Param, Tensors, UnitInfo, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("iso_c", base="required", linear_layers=True, time="decompositions")
def iso_c(deltas: Tensors, *, lambda_: Lambda = 1.0) -> Tensor:
    """Add up the task vectors, and give every singular direction the mean strength.

    With Σ τ_i = U diag(s) Vᵀ the result is θ_0 + λ mean(s) U Vᵀ. Only directions within the
    numerical rank count: a low-rank update (LoRA) is not filled up with noise. If only one model
    changed a weight, its change is used unmodified.
    """
    if len(deltas) < 2:
        return lambda_ * deltas[0]
    spectrum = Spectrum.of(torch.stack([*deltas]).sum(0))
    if not len(spectrum.values):
        return torch.zeros_like(deltas[0])
    return lambda_ * spectrum.values.mean() * (spectrum.left @ spectrum.right.T)


@merge_method("iso_cts", base="required", linear_layers=True, time="decompositions")
def iso_cts(
    deltas: Tensors,
    unit: UnitInfo,
    *,
    lambda_: Lambda = 1.0,
    common: Annotated[
        float,
        Param("share of the directions that the models have in common", minimum=0, maximum=1),
    ] = 0.8,
) -> Tensor:
    """As `iso_c`, with some directions reserved for each model alone.

    The leading `common` share of the directions of Σ τ_i = U_c diag(s) V_cᵀ stays; the rest is
    filled, in equal parts, with the leading directions of each (I - U_c U_cᵀ) τ_i. Both sides are
    made orthogonal (polar factors), and all directions get the mean strength.
    """
    if len(deltas) < 2:
        return lambda_ * deltas[0]
    rank = min(deltas[0].shape)
    own = round((1 - common) * rank / len(deltas))
    shared = Spectrum.of(torch.stack([*deltas]).sum(0), most=rank - own * len(deltas))
    spectra = [shared]
    for delta in map(torch.Tensor.double, deltas if own else ()):
        unit.check_stopped()
        outside = delta - shared.left @ (shared.left.T @ delta)
        spectra.append(Spectrum.of(outside, size=float(delta.norm()), most=own))
    values = torch.cat([spectrum.values for spectrum in spectra])
    if not len(values):
        return torch.zeros_like(deltas[0])
    left = nearest_orthogonal(torch.cat([spectrum.left for spectrum in spectra], dim=1))
    right = nearest_orthogonal(torch.cat([spectrum.right for spectrum in spectra], dim=1))
    return lambda_ * values.mean() * (left @ right.T)
