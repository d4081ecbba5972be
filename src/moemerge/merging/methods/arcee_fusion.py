"""Arcee Fusion: take the changes that matter most to what a layer says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_SPREAD = 1.5  # interquartile ranges above the median from which an element counts


@merge_method(
    "arcee_fusion", base=BasePolicy.REQUIRED, per_model=NoParams, options=NoParams, models=(1, 1)
)
def arcee_fusion(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: NoParams, unit: UnitInfo
) -> Tensor:
    """Move the base's elements to the model's where the change is unusually important.

    An element's importance is |θ - θ_0| times the divergence KL(softmax θ ‖ softmax θ_0) of its
    row; elements at or above the median plus 1.5 interquartile ranges are taken from the model.
    """
    assert base is not None
    tensor = inputs[0].tensor
    if base.numel() == 0 or base.dim() == 0:
        return base.clone(memory_format=torch.contiguous_format)
    # Divergences of nearby rows are differences of second order: float64 keeps their digits.
    log_p, log_q = tensor.double().log_softmax(-1), base.double().log_softmax(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1, keepdim=True)
    importance = (tensor - base).abs() * divergence
    low, middle, high = _quartiles(importance.flatten())
    kept = importance >= middle + _SPREAD * (high - low)
    return torch.where(kept, tensor, base).contiguous()


def _quartiles(values: Tensor) -> tuple[float, float, float]:
    """Quantiles by linear interpolation; the middle one is the lower median."""
    ordered = values.sort().values
    last = len(ordered) - 1

    def quantile(share: float) -> float:
        place = share * last
        below = int(place)
        above = min(below + 1, last)
        step = place - below
        return float(ordered[below]) * (1 - step) + float(ordered[above]) * step

    return quantile(0.25), float(ordered[last // 2]), quantile(0.75)
