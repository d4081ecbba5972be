"""Arcee Fusion: take a model's unusually important changes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moemerge.methods._sparsify import ordered_at
from moemerge.methods._tensors import row_chunks
from moemerge.methods.method import Tensors, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_SPREAD = 1.5  # threshold above the median, in interquartile ranges


@merge_method("arcee_fusion", base="required", models=(1, 1))
def arcee_fusion(tensors: Tensors, base: Tensor) -> Tensor:
    """Move the base's elements to the model's where the change is unusually important.

    An element's importance is |θ - θ_0| times the divergence KL(softmax θ ‖ softmax θ_0) of its
    row; elements at or above the median plus 1.5 interquartile ranges are taken from the model.
    """
    if base.dim() == 0:
        return base
    importance = _importance(tensors[0], base)
    low, middle, high = _quartiles(importance)
    return torch.where(importance >= middle + _SPREAD * (high - low), tensors[0], base)


def _importance(tensor: Tensor, base: Tensor) -> Tensor:
    """Return the importance of every element in float64; nearby rows diverge in second order."""
    columns = base.shape[-1]
    importance = torch.empty(base.numel(), dtype=torch.float64, device=base.device)
    for at in row_chunks(base.numel() // columns, columns, base.device):
        p, q = (x.reshape(-1)[at].view(-1, columns) for x in (tensor, base))
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1, keepdim=True)
        importance[at] = ((p - q).abs() * divergence).view(-1)
    return importance.view(base.shape)


def _quartiles(values: Tensor) -> tuple[float, float, float]:
    """Return the quartiles by linear interpolation, with the lower median."""
    last = values.numel() - 1
    ends = []
    for place in (0.25 * last, 0.75 * last):
        below, above = ordered_at(values, [int(place), min(int(place) + 1, last)])
        ends.append(below * (1 - place % 1) + above * (place % 1))
    [middle] = ordered_at(values, [last // 2])
    return ends[0], middle, ends[1]
