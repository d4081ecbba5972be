"""SCE: select, calculate and erase (Wan et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._sparsify import keep_largest
from moemerge.methods._tensors import average, gram
from moemerge.methods.method import Ignored, Param, Tensors, merge_method
from moemerge.methods.ties import elected_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_SHARE = 1e-6  # smallest divisor, as in mergekit


@merge_method("sce", base="required")
def sce(
    deltas: Tensors,
    *,
    select_topk: Annotated[
        float, Param("fraction of the varying elements that is kept", minimum=0, maximum=1)
    ] = 1.0,
    int8_mask: Ignored = False,
) -> Tensor:
    """Keep where task vectors vary most, weigh models by their size there, erase minority signs.

    An element on which all models agree does not vary, so below `select_topk` 1 it is never kept:
    a tensor that is equal in all models becomes the base's.
    """
    if select_topk < 1:
        variance = _variance(deltas)
        varying = int(torch.count_nonzero(variance))
        kept = keep_largest(variance, int(varying * select_topk)) != 0
        deltas = [delta * kept for delta in deltas]
    sizes = [gram([delta]).item() for delta in deltas]
    if not any(sizes):
        return torch.zeros_like(deltas[0])
    weights = [size / sum(sizes) for size in sizes]
    return elected_sum(deltas, weights, normalize=True, election="unweighted", floor=_LEAST_SHARE)


def _variance(deltas: Tensors) -> Tensor:
    """Return the biased variance over models, per element; exactly zero if they agree."""
    # Subtract the first model: the mean of three equal numbers may differ from them by rounding,
    # but their variance must be zero.
    others = [delta - deltas[0] for delta in deltas]
    mean, variance = average(others), torch.zeros_like(deltas[0])
    for other in others:
        variance.addcmul_(other - mean, other - mean, value=1 / len(others))
    return variance
