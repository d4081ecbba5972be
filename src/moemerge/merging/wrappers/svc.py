"""SVC: scale back singular values that several models count twice (2602.05536)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.merging.method import ModelTensor, UnitInfo, param
from moemerge.merging.methods._spectra import Spectrum
from moemerge.merging.methods._task_vectors import changes, is_linear
from moemerge.merging.wrapper import Inner, merge_wrapper
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SvcOptions:
    alpha: float = param(
        1.0,
        minimum=0,
        exclusive_minimum=True,
        help="lower limit of a model's share; below 1 a direction may also be strengthened",
    )


@merge_wrapper("svc", options=SvcOptions)
def svc(
    inner: Inner,
    inputs: Sequence[ModelTensor],
    base: ModelTensor,
    options: SvcOptions,
    unit: UnitInfo,
) -> Tensor:
    """Weaken singular directions of the merge that answer more than the models' own changes do.

    With D = U diag(σ) Vᵀ the merged change of a linear layer, s_ri = ⟨u_rᵀD, u_rᵀτ_i⟩/‖u_rᵀτ_i‖²
    is the fraction of model i's output in direction r that the merge contains, and
    σ_r ← σ_r T / Σ_i max(α, s_ri). T counts only the models that changed the weight.
    """
    merged = inner(inputs, base.tensor)
    if not is_linear(base.tensor, unit):
        return merged
    vectors = changes(inputs, base.tensor)
    spectrum = Spectrum.of(merged - base.tensor)
    if not vectors or not len(spectrum.values):
        return merged
    shares = torch.zeros_like(spectrum.values)
    for vector in vectors:
        unit.check_stopped()
        shares += contained(spectrum, vector.double()).clamp_min(options.alpha)
    scaled = spectrum.values * (len(vectors) / shares)
    change = (spectrum.left * scaled) @ spectrum.right.T
    return (base.tensor + change).to(merged.dtype).contiguous()


def contained(spectrum: Spectrum, vector: Tensor) -> Tensor:
    """Return s_r of one task vector, (rank,); 0 for directions that it does not have."""
    own = spectrum.left.T @ vector  # (rank, in): u_rᵀ τ
    merged = spectrum.values[:, None] * spectrum.right.T  # u_rᵀ D
    sizes = own.square().sum(1)
    # Far below the float32 rounding error of the largest, a direction is noise.
    present = sizes > sizes.max() * torch.finfo(torch.float32).eps ** 2
    shares = (merged * own).sum(1) / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return torch.where(present, shares, 0.0)
