"""Arcee Fusion: take the changes that matter most to a layer's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method
from moemerge.merging.methods._selection import ordered_at
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_ELEMENTS = 2**20  # compared at once
_SPREAD = 1.5  # threshold above the median, in interquartile ranges


@merge_method("arcee_fusion", base=BasePolicy.REQUIRED, options=NoParams, models=(1, 1))
def arcee_fusion(
    inputs: Sequence[ModelTensor], base: Tensor, options: NoParams, unit: UnitInfo
) -> Tensor:
    """Move the base's elements to the model's where the change is unusually important.

    An element's importance is |θ - θ_0| times the divergence KL(softmax θ ‖ softmax θ_0) of its
    row; elements at or above the median plus 1.5 interquartile ranges are taken from the model.
    """
    tensor = inputs[0].tensor
    if base.numel() == 0 or base.dim() == 0:
        return base.clone(memory_format=torch.contiguous_format)
    importance = _importance(tensor, base)
    low, middle, high = _quartiles(importance.flatten())
    kept = importance >= middle + _SPREAD * (high - low)
    return torch.where(kept, tensor, base).contiguous()


def _importance(tensor: Tensor, base: Tensor) -> Tensor:
    """Return the importance of every element in float64; nearby rows diverge in second order."""
    rows, step = base.reshape(-1, base.shape[-1]), max(1, _ELEMENTS // max(1, base.shape[-1]))
    others = tensor.reshape(rows.shape)
    importance = torch.empty(rows.shape, dtype=torch.float64, device=base.device)
    for start in range(0, len(rows), step):
        p, q = others[start : start + step], rows[start : start + step]
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1, keepdim=True)
        torch.mul((p - q).abs(), divergence, out=importance[start : start + step])
    return importance.view(base.shape)


def _quartiles(values: Tensor) -> tuple[float, float, float]:
    """Return the quartiles by linear interpolation, with the lower median."""
    last = len(values) - 1
    places = [share * last for share in (0.25, 0.75)]
    around = [[int(place), min(int(place) + 1, last)] for place in places]
    *ends, middle = ordered_at(values, [*around[0], *around[1], last // 2])
    low, high = (
        below * (1 - place % 1) + above * (place % 1)
        for place, below, above in zip(places, ends[::2], ends[1::2], strict=True)
    )
    return low, middle, high
