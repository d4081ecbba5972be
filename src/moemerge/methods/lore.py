"""LoRE merging: a common base and low-rank changes, both estimated (Liu et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._spectra import Spectrum
from moemerge.methods._tensors import average
from moemerge.methods.method import Param, Tensors, UnitInfo, is_linear, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("lore", base="donor", time="decompositions")
def lore(
    tensors: Tensors,
    unit: UnitInfo,
    *,
    mu: Annotated[float, Param("penalty on the changes' squared nuclear norm", minimum=0)] = 0.01,
    iterations: Annotated[int, Param("alternating updates of base and changes", minimum=1)] = 10,
    lambda_: Annotated[float, Param("factor on the sum of the low-rank changes")] = 1.0,
) -> Tensor:
    """Split the models into a common base and low-rank changes; add the changes to that base.

    Minimises Σ ‖β + δ_i - θ_i‖² + mu ‖δ_i‖_*² over β and the δ_i in turn, from β = mean θ_i. The
    result is β + λ Σ δ_i; with two models it is their average. Needs no base model. All tensors
    other than linear layers are averaged.
    """
    mean = average(tensors)
    # With two models the changes are always each other's negatives and cancel.
    if not is_linear(mean, unit) or len(tensors) < 3:
        return mean
    models = torch.stack([*tensors]).double()
    common = mean.double()
    for _ in range(iterations):
        unit.check_stopped()
        changes = torch.stack([shrunk(model - common, mu) for model in models])
        common = (models - changes).mean(0)
    return common + lambda_ * changes.sum(0)


def shrunk(matrix: Tensor, mu: float) -> Tensor:
    """Return argmin_δ ‖matrix - δ‖² + mu ‖δ‖_*²: subtract mu ‖δ‖_* from the singular values."""
    spectrum = Spectrum.of(matrix)
    if not len(spectrum.values):
        return torch.zeros_like(matrix)
    sums = spectrum.values.cumsum(0)
    count = torch.arange(1, len(sums) + 1, dtype=sums.dtype, device=sums.device)
    nuclear = sums / (1 + mu * count)  # ‖δ‖_* if `count` values remain
    kept = max(1, int((spectrum.values > mu * nuclear).sum()))
    values = (spectrum.values[:kept] - mu * nuclear[kept - 1]).clamp_min(0)
    return (spectrum.left[:, :kept] * values) @ spectrum.right[:, :kept].T
