"""Interpolation along arcs: SLERP, NuSLERP and multi-model SLERP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moemerge.methods._tensors import NO_DIRECTION, ZERO_SUM, cosine, gram, shares, weighted_sum
from moemerge.methods.method import Param, Tensors, Weight, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PARALLEL = 0.9995  # mergekit's: closer to ±1, interpolation is linear
# If sin θ is below this, interpolate along the chord instead of the arc. They agree to 1e-8 for
# parallel vectors; for opposite vectors no arc is preferred.
_FLAT_ARC = 1e-4


@merge_method("slerp", base="required", models=(1, 1))
def slerp(
    tensors: Tensors,
    base: Tensor,
    *,
    t: Annotated[float, Param("0 is the base, 1 the other model")],
) -> Tensor:
    """Interpolate along the arc from the base to one model, each tensor taken as one vector."""
    pair = [base, tensors[0]]
    c = cosine(gram(pair), 0, 1)
    if abs(c) > _PARALLEL:
        return weighted_sum(pair, [1 - t, t])
    theta = math.acos(c)
    sine = math.sin(theta)
    return weighted_sum(pair, [math.sin((1 - t) * theta) / sine, math.sin(t * theta) / sine])


@merge_method("nuslerp", base="optional", models=(2, 2))
def nuslerp(
    tensors: Tensors,
    base: Tensor | None,
    weights: Weight,
    *,
    nuslerp_flatten: Annotated[bool, Param("take a tensor as one vector")] = True,
    nuslerp_row_wise: Annotated[
        bool,
        Param(
            "without flattening: interpolate columns (along the first axis) instead of rows "
            "(along the last), which is what mergekit does under this name"
        ),
    ] = False,
) -> Tensor:
    """Interpolate along the arc between two models; with a base, between their task vectors.

    The position on the arc is t = w_2 / (w_1 + w_2), or one half if the sum is zero.
    """
    total = sum(weights)
    t = weights[1] / total if abs(total) >= ZERO_SUM else 0.5
    x, y = tensors if base is None else [tensor - base for tensor in tensors]
    if nuslerp_flatten or x.dim() < 2:
        first, second = _arc(torch.tensor(cosine(gram([x, y]), 0, 1), dtype=torch.float64), t)
        merged = weighted_sum([x, y], [first.item(), second.item()])
    else:
        axis = 0 if nuslerp_row_wise else -1
        x, y = x.double(), y.double()
        norms = x.norm(dim=axis, keepdim=True) * y.norm(dim=axis, keepdim=True)
        # A zero vector is orthogonal to all.
        cosines = (x * y).sum(axis, keepdim=True) / torch.where(norms > 0, norms, 1.0)
        first, second = _arc(cosines, t)
        merged = first * x + second * y
    return merged if base is None else base + merged


def _arc(cosines: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return (c_0, c_1) such that c_0 x_0 + c_1 x_1 is at fraction `t` of the arc."""
    theta = torch.arccos(cosines.clamp(-1, 1))
    sine = torch.sin(theta)
    straight = sine < _FLAT_ARC
    safe = torch.where(straight, 1.0, sine)
    first = torch.where(straight, 1 - t, torch.sin((1 - t) * theta) / safe)
    second = torch.where(straight, t, torch.sin(t * theta) / safe)
    return first, second


def check_shares(weights: Sequence[float], normalize_weights: bool, eps: float) -> None:
    if normalize_weights:
        shares(weights)


@merge_method("multislerp", base="optional", check=check_shares)
def multislerp(
    tensors: Tensors,
    base: Tensor | None,
    weights: Weight,
    *,
    normalize_weights: Annotated[bool, Param("divide the weights by their sum")] = True,
    eps: Annotated[float, Param("norms up to this count as zero", minimum=0)] = 1e-8,
) -> Tensor:
    """Mean direction of the models at their mean length; with a base, of their task vectors.

    (Σ w_i ‖x_i‖) · u / ‖u‖ with u = Σ w_i x_i / ‖x_i‖. Directions that cancel have no mean: then
    the result is the plain Σ w_i x_i.
    """
    weights = shares(weights) if normalize_weights else weights
    vectors = tensors if base is None else [tensor - base for tensor in tensors]
    g = gram(vectors)
    norms, w = g.diagonal().sqrt(), g.new_tensor(weights)
    units = (w / norms).where(norms > eps, 0.0)
    length = math.sqrt(max(0.0, (units @ g @ units).item()))
    if length > max(eps, NO_DIRECTION * w.abs().sum().item()):
        weights = (units * ((w * norms).sum() / length)).tolist()
    merged = weighted_sum(vectors, weights)
    return merged if base is None else base + merged
