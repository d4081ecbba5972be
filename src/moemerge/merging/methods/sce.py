"""SCE: select, calculate, erase (Wan et al. 2024, "FuseChat")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import chunks, gram, scratch
from moemerge.merging.methods._selection import keep_largest_
from moemerge.merging.methods._task_vectors import TaskVector, add_elected, flat_difference
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_LEAST_DIVISOR = 1e-6  # mergekit's; affects only models with a smaller share


@dataclass(frozen=True)
class SceOptions:
    select_topk: float = param(
        1.0, minimum=0, maximum=1, help="fraction of the varying elements that is kept"
    )
    int8_mask: bool = param(False, help="accepted for mergekit's configs; has no effect here")


@merge_method("sce", base=BasePolicy.REQUIRED, per_model=NoParams, options=SceOptions)
def sce(inputs: Sequence[ModelTensor], base: Tensor, options: SceOptions, unit: UnitInfo) -> Tensor:
    """Keep where task vectors vary most, weigh models by their size there, erase minority signs.

    An element on which all models agree does not vary, so below `select_topk` 1 it is never kept:
    a tensor that is equal in all models becomes the base's.
    """
    deltas = [flat_difference(i.tensor, base) for i in inputs]
    if options.select_topk < 1:
        _select_(deltas, options.select_topk)
    sizes = [gram([d]).item() for d in deltas]
    total = sum(sizes)
    if total == 0:
        return base.clone(memory_format=torch.contiguous_format)
    return add_elected(
        base,
        [TaskVector(d, size / total) for d, size in zip(deltas, sizes, strict=True)],
        normalize=True,
        factor=1.0,
        election="unweighted",
        floor=_LEAST_DIVISOR,
    )


def _select_(deltas: Sequence[Tensor], fraction: float) -> None:
    """Zero all but the given fraction of the elements whose variance over models is largest."""
    variance = _variance(deltas)
    varying = int(torch.count_nonzero(variance))
    keep_largest_(variance, int(varying * fraction))
    for at in chunks(variance):
        dropped = variance[at] == 0
        for delta in deltas:
            delta[at].masked_fill_(dropped, 0.0)


def _variance(deltas: Sequence[Tensor]) -> Tensor:
    """Return the biased variance over models, per element; exactly zero if they agree."""
    variance = torch.zeros_like(deltas[0])
    buffers = scratch(variance, 2)
    share = 1 / len(deltas)
    for at in chunks(variance):
        mean, deviation = (x[: at.stop - at.start] for x in buffers)
        mean.zero_()
        # Subtract the first model: the mean of three equal numbers may differ from them by
        # rounding, but their variance must be zero.
        for delta in deltas[1:]:
            mean.add_(torch.sub(delta[at], deltas[0][at], out=deviation), alpha=share)
        for delta in deltas:
            torch.sub(delta[at], deltas[0][at], out=deviation).sub_(mean)
            variance[at].addcmul_(deviation, deviation, value=share)
    return variance
