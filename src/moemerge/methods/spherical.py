"""Merges by angles: SLERP, NuSLERP, multi-model SLERP, Karcher's mean and Model Stock (Jang et al.
2024).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.methods._arithmetic import (
    NO_DIRECTION,
    ZERO_SUM,
    Weighted,
    arc_coefficients,
    average,
    cosine,
    from_base,
    gram,
    optional_shares,
    weighted_sum,
)
from moemerge.methods.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_PARALLEL = 0.9995  # mergekit's: closer to ±1, interpolation is linear
_NO_LENGTH = 1e-30  # relative to the longest; the inverse of less overflows in float32


@dataclass(frozen=True)
class SlerpOptions:
    t: float = param(help="0 is the base, 1 the other model")


@merge_method("slerp", base=BasePolicy.REQUIRED, options=SlerpOptions, models=(1, 1))
def slerp(
    inputs: Sequence[ModelTensor], base: Tensor, options: SlerpOptions, unit: UnitInfo
) -> Tensor:
    """Interpolate along the arc from the base to one model, each tensor taken as one vector."""
    t, other = options.t, inputs[0].tensor
    c = cosine(gram([base, other]), 0, 1)
    if abs(c) > _PARALLEL:
        return weighted_sum([base, other], [1 - t, t])
    theta = math.acos(c)
    sine = math.sin(theta)
    return weighted_sum(
        [base, other], [math.sin((1 - t) * theta) / sine, math.sin(t * theta) / sine]
    )


@dataclass(frozen=True)
class NuslerpOptions:
    nuslerp_flatten: bool = param(True, help="take a tensor as one vector")
    nuslerp_row_wise: bool = param(
        False,
        help="without flattening: interpolate columns (along the first axis) instead of rows "
        "(along the last), which is what mergekit does under this name",
    )


@merge_method(
    "nuslerp", base=BasePolicy.OPTIONAL, per_model=Weighted, options=NuslerpOptions, models=(2, 2)
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


@dataclass(frozen=True)
class MultislerpOptions:
    normalize: bool = param(True, key="normalize_weights", help="divide the weights by their sum")
    eps: float = param(1e-8, minimum=0, help="norms up to this count as zero")


@merge_method(
    "multislerp",
    base=BasePolicy.OPTIONAL,
    per_model=Weighted,
    options=MultislerpOptions,
    weights=optional_shares,
)
def multislerp(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: MultislerpOptions, unit: UnitInfo
) -> Tensor:
    """Mean direction of the models at their mean length; with a base, of their task vectors.

    (Σ w_i ‖x_i‖) · u / ‖u‖ with u = Σ w_i x_i / ‖x_i‖. Directions that cancel have no mean: then
    the result is the plain Σ w_i x_i.
    """
    weights = optional_shares([i.params for i in inputs], options, unit)
    coefficients = _coefficients(gram([i.tensor for i in inputs], base), weights, options.eps)
    if base is None:
        return average(inputs, coefficients)
    return from_base(base, inputs, coefficients)


def _coefficients(g: Tensor, weights: Sequence[float], eps: float) -> list[float]:
    """Return the coefficient of each x_i, from their Gram matrix."""
    norms = g.diagonal().sqrt()
    w = g.new_tensor(weights)
    units = (w / norms).where(norms > eps, 0.0)
    length = math.sqrt(max(0.0, (units @ g @ units).item()))
    if length <= max(eps, NO_DIRECTION * w.abs().sum().item()):
        return list(weights)
    result: list[float] = (units * ((w * norms).sum() / length)).tolist()
    return result


@dataclass(frozen=True)
class KarcherOptions:
    max_iter: int = param(10, minimum=1, help="maximum steps of the mean's fixed-point iteration")
    tol: float = param(1e-5, minimum=0, help="stop once a step is shorter than this")


@merge_method("karcher", base=BasePolicy.MEMBER, options=KarcherOptions)
def karcher(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: KarcherOptions, unit: UnitInfo
) -> Tensor:
    """Take the Karcher mean of the models' directions on the sphere, at their mean length.

    Tensors of zeros, or nearly so, have no direction but count towards the mean length. Directions
    that cancel have no mean: then the result is the plain average.
    """
    g = gram([i.tensor for i in inputs])
    norms = g.diagonal().sqrt()
    valid = norms > norms.max() * _NO_LENGTH
    inverse = torch.where(valid, 1 / norms, 0.0)
    mean = _mean_direction(g * inverse[:, None] * inverse, valid, options.max_iter, options.tol)
    if mean is None:
        return average(inputs)
    return average(inputs, (mean * inverse * norms.mean()).tolist())


def _mean_direction(cosines: Tensor, valid: Tensor, max_iter: int, tol: float) -> Tensor | None:
    """Return coefficients c of the mean m = Σ c_i u_i of unit vectors; None if they cancel.

    Iterates m <- exp_m(mean of log_m(u_i)) with log_m(u) = θ/sin θ · (u - cos θ m).
    """
    count = valid.sum()
    c = valid.double()
    length = (c @ cosines @ c).clamp_min(0).sqrt()
    if length <= NO_DIRECTION * count:
        return None
    c = c / length
    for _ in range(max_iter):
        cos = (cosines @ c).clamp(-1, 1)
        theta = torch.arccos(cos)
        sine = torch.sin(theta)
        # θ/sin θ is 1 at θ = 0. At θ = π no direction is preferred, so the term is zero.
        ratio = torch.where(sine > NO_DIRECTION, theta / sine, (cos > 0).double()) * valid
        step = (ratio - (ratio * cos).sum() * c) / count
        size = (step @ cosines @ step).clamp_min(0).sqrt()
        if size < tol:
            break
        c = torch.cos(size) * c + torch.sin(size) * step / size
        c = c / (c @ cosines @ c).sqrt()
    return c


# The ratio's divisor is zero if the task vectors cancel; their average is then the base.
_LEAST_DIVISOR = 1e-6


@dataclass(frozen=True)
class ModelStockOptions:
    filter_wise: bool = param(False, help="one ratio for each row instead of each tensor")


@merge_method("model_stock", base=BasePolicy.REQUIRED, options=ModelStockOptions, models=(2, None))
def model_stock(
    inputs: Sequence[ModelTensor], base: Tensor, options: ModelStockOptions, unit: UnitInfo
) -> Tensor:
    """Go from the base towards the models' average, the further the more their changes agree.

    The result is t·mean(θ_i) + (1 - t)·θ_0 with t = N cos / (1 + (N - 1) cos). cos is the mean over
    pairs of task vectors, 0 for a zero vector.
    """
    tensors, n = [i.tensor for i in inputs], len(inputs)
    if options.filter_wise and base.dim() > 1 and base.numel() > 0:
        return _by_row(tensors, base)
    g = gram(tensors, base)
    pairs = list(itertools.combinations(range(n), 2))
    mean = torch.tensor(sum(cosine(g, i, j) for i, j in pairs) / len(pairs), dtype=torch.float64)
    t = _ratio(mean, n).item()
    return weighted_sum([base, *tensors], [1 - t, *([t / n] * n)])


def _by_row(tensors: Sequence[Tensor], base: Tensor) -> Tensor:
    n, rows = len(tensors), base.shape[0]
    origin = base.reshape(rows, -1).double()
    total = torch.zeros_like(origin)  # Σ δ_i
    direction = torch.zeros_like(origin)  # Σ δ_i / ‖δ_i‖
    nonzero = torch.zeros(rows, 1, dtype=origin.dtype, device=origin.device)
    for tensor in tensors:
        delta = tensor.reshape(rows, -1) - origin
        norm = torch.linalg.vector_norm(delta, dim=1, keepdim=True)
        nonzero += norm > 0
        total += delta
        direction += delta / torch.where(norm > 0, norm, 1.0)
    # ‖Σ u_i‖² = Σ ‖u_i‖² + the cosines of all ordered pairs
    pairs = direction.square().sum(1, keepdim=True) - nonzero
    t = _ratio(pairs / (n * (n - 1)), n)
    return (origin + t * total / n).to(base.dtype).view(base.shape)


def _ratio(cos: Tensor, n: int) -> Tensor:
    divisor = 1 + (n - 1) * cos
    vanishes = divisor < _LEAST_DIVISOR
    return torch.where(vanishes, 0.0, n * cos / torch.where(vanishes, 1.0, divisor))
