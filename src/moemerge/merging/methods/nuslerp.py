"""Spherical interpolation between two models, of tensors, rows or columns, or of task vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import arc_coefficients, cosine, gram, weighted_sum
from moemerge.merging.methods._weights import ZERO_SUM, Weighted
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NuslerpOptions:
    nuslerp_flatten: bool = param(True, help="take a tensor as one vector")
    nuslerp_row_wise: bool = param(
        False,
        help="without flattening: interpolate columns (along the first axis) instead of rows "
        "(along the last), which is what mergekit does under this name",
    )


@merge_method(
    "nuslerp",
    base=BasePolicy.OPTIONAL,
    per_model=Weighted,
    options=NuslerpOptions,
    models=(2, 2),
)
def nuslerp(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: NuslerpOptions, unit: UnitInfo
) -> Tensor:
    """Interpolate along the arc between two models; with a base, between their task vectors.

    The position on the arc is t = w_2 / (w_1 + w_2), or one half if the sum is zero.
    """
    first, second = (i.tensor for i in inputs)
    w1, w2 = (i.params.weight for i in inputs)
    t = w2 / (w1 + w2) if abs(w1 + w2) >= ZERO_SUM else 0.5
    if options.nuslerp_flatten or first.dim() < 2:
        c = torch.tensor(cosine(gram([first, second], base), 0, 1), dtype=torch.float64)
        share1, share2 = (x.item() for x in arc_coefficients(c, t))
        if base is None:
            return weighted_sum([first, second], [share1, share2])
        return weighted_sum([base, first, second], [1 - share1 - share2, share1, share2])
    axis = 0 if options.nuslerp_row_wise else -1
    x, y = first.double(), second.double()
    if base is not None:
        x, y = x - base, y - base
    c1, c2 = _arcs(x, y, axis, t)
    merged = c1 * x + c2 * y if base is None else c1 * x + c2 * y + base
    return merged.to(first.dtype).contiguous()


def _arcs(x: Tensor, y: Tensor, axis: int, t: float) -> tuple[Tensor, Tensor]:
    """Return the coefficients for each vector along `axis`; a zero vector is orthogonal to all."""
    norms = torch.linalg.vector_norm(x, dim=axis, keepdim=True)
    norms = norms * torch.linalg.vector_norm(y, dim=axis, keepdim=True)
    products = (x * y).sum(axis, keepdim=True)
    return arc_coefficients(products / torch.where(norms > 0, norms, 1.0), t)
