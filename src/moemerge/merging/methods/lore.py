"""LoRE: estimate a common base and low-rank changes from the models alone (Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import weighted_sum
from moemerge.merging.methods._spectra import Spectrum
from moemerge.merging.methods._task_vectors import is_linear
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoreOptions:
    mu: float = param(0.01, minimum=0, help="penalty on the changes' squared nuclear norm")
    iterations: int = param(10, minimum=1, help="alternating updates of base and changes")
    lambda_: float = param(1.0, key="lambda", help="factor on the sum of the low-rank changes")


@merge_method("lore", base=BasePolicy.DONOR, options=LoreOptions, time="decompositions")
def lore(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: LoreOptions, unit: UnitInfo
) -> Tensor:
    """Split the models into a common base and low-rank changes; add the changes to that base.

    Minimises Σ ‖β + δ_i - θ_i‖² + mu ‖δ_i‖_*² over β and the δ_i in turn, from β = mean θ_i. The
    result is β + λ Σ δ_i; with two models it is their average. Needs no base model. All tensors
    other than linear layers are averaged.
    """
    tensors = [i.tensor for i in inputs]
    mean = weighted_sum(tensors, [1 / len(tensors)] * len(tensors))
    # With two models the changes are always each other's negatives and cancel.
    if not is_linear(mean, unit) or len(tensors) < 3:
        return mean
    common, low_rank = mean.double(), [torch.zeros_like(mean, dtype=torch.float64)] * len(tensors)
    for _ in range(options.iterations):
        unit.check_stopped()
        low_rank = [_shrunk(t.double() - common, options.mu) for t in tensors]
        common = torch.stack([t.double() - d for t, d in zip(tensors, low_rank, strict=True)]).mean(
            0
        )
    return (common + options.lambda_ * torch.stack(low_rank).sum(0)).to(mean.dtype).contiguous()


def _shrunk(matrix: Tensor, mu: float) -> Tensor:
    """Return argmin_δ ‖matrix - δ‖² + mu ‖δ‖_*²: subtract mu ‖δ‖_* from the singular values."""
    spectrum = Spectrum.of(matrix)
    if not len(spectrum.values):
        return torch.zeros_like(matrix)
    sums = spectrum.values.cumsum(0)
    count = torch.arange(1, len(sums) + 1, dtype=sums.dtype, device=sums.device)
    nuclear = sums / (1 + mu * count)  # ‖δ‖_* if `count` values remain
    kept = max(1, int((spectrum.values > mu * nuclear).sum()))
    values = (spectrum.values[:kept] - mu * nuclear[kept - 1]).clamp_min(0)
    top = spectrum.top(kept)
    return (top.left * values) @ top.right.T
