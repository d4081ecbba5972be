"""Model weights; sums, inner products and angles of tensors, in chunks that fit a core's cache.

A merge unit has a few million elements. A formula of a dozen elementwise steps over all of it would
go to memory a dozen times, so every function here works on chunks and reuses its buffers.

Means on the sphere are sums Σ c_i x_i whose coefficients depend on inner products alone. One pass
computes the Gram matrix; the rest is arithmetic on n numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.errors import ConfigError
from moemerge.methods.method import ModelTensor, Remark, UnitInfo, UnitStatistics, param
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# 256 Ki float32 are 1 MiB: buffers stay in cache, and chunks take long enough that threads do not
# contend for the interpreter lock.
CPU_CHUNK = 1 << 18
# An accelerator needs one large launch. A power of two keeps each chunk inside one 2^32 range.
DEVICE_CHUNK = 1 << 28

# A shorter sum of unit vectors has no direction: in float32 it is rounding error.
NO_DIRECTION = 1e-6
# If sin θ is below this, interpolate along the chord instead of the arc. They agree to 1e-8 for
# parallel vectors; for opposite vectors no arc is preferred.
_FLAT_ARC = 1e-4


def flat(tensor: Tensor) -> Tensor:
    """Return all elements in (out, in) order. Copies only if the tensor is not contiguous."""
    return tensor.reshape(-1)


def chunk_size(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK


def chunks(tensor: Tensor) -> Iterator[slice]:
    """Yield slices that cover a flat tensor, each small enough for its device's cache."""
    step = chunk_size(tensor.device)
    for start in range(0, tensor.numel(), step):
        yield slice(start, min(start + step, tensor.numel()))


def scratch(like: Tensor, count: int) -> list[Tensor]:
    """Return `count` uninitialised buffers as long as the longest chunk of `like`."""
    length = min(like.numel(), chunk_size(like.device))
    return [like.new_empty(length) for _ in range(count)]


def bits(values: Tensor) -> Tensor:
    """Return a view of the same memory as signed integers."""
    return values.view({4: torch.int32, 8: torch.int64}[values.dtype.itemsize])


def sign_bit(dtype: torch.dtype) -> int:
    """Return the integer with only the sign bit of `dtype` set."""
    return -(1 << (8 * dtype.itemsize - 1))


def by_chunks(
    base: Tensor, tensors: Sequence[Tensor], merge: Callable[[Tensor, list[Tensor]], Tensor]
) -> Tensor:
    """Return `merge` of the base's and the tensors' elements, chunk by chunk, in `base`'s shape."""
    origin, flats = flat(base), [flat(t) for t in tensors]
    out = torch.empty_like(origin)
    for at in chunks(origin):
        out[at] = merge(origin[at], [x[at] for x in flats])
    return out.view(base.shape)


def magnitude(chunk: Tensor) -> float:
    """Return Σ|v| of one chunk."""
    return float(chunk.abs().sum())


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w_i x_i in the tensors' shape, as a new contiguous tensor."""
    flats = [flat(t) for t in tensors]
    out = torch.empty_like(flats[0])
    for at in chunks(out):
        chunk = torch.mul(flats[0][at], weights[0], out=out[at])
        for x, weight in zip(flats[1:], weights[1:], strict=True):
            chunk.add_(x[at], alpha=weight)
    return out.view(tensors[0].shape)


def gram(tensors: Sequence[Tensor], origin: Tensor | None = None) -> Tensor:
    """Return G_ij = x_i·x_j of the tensors (minus `origin`), in float64 on the CPU."""
    flats = [flat(t) for t in tensors]
    zero = None if origin is None else flat(origin)
    total = torch.zeros(len(flats), len(flats), dtype=torch.float64, device=flats[0].device)
    for at in chunks(flats[0]):
        rows = torch.stack([x[at] if zero is None else x[at] - zero[at] for x in flats]).double()
        total += rows @ rows.T
    return total.cpu()


def cosine(g: Tensor, i: int, j: int) -> float:
    """Return the cosine of x_i and x_j from their Gram matrix; 0 for a zero vector."""
    norms = math.sqrt(g[i, i].item() * g[j, j].item())
    return max(-1.0, min(1.0, g[i, j].item() / norms)) if norms > 0 else 0.0


def arc_coefficients(cosines: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Return (c_0, c_1) such that c_0 x_0 + c_1 x_1 is at fraction `t` of the arc."""
    theta = torch.arccos(cosines.clamp(-1, 1))
    sine = torch.sin(theta)
    straight = sine < _FLAT_ARC
    safe = torch.where(straight, 1.0, sine)
    first = torch.where(straight, 1 - t, torch.sin((1 - t) * theta) / safe)
    second = torch.where(straight, t, torch.sin(t * theta) / safe)
    return first, second


ZERO_SUM = 1e-8  # a smaller sum of weights counts as zero


@dataclass(frozen=True)
class Weighted:
    """A model's weight in a sum."""

    weight: float = param(help="this model's share of the sum")


@dataclass(frozen=True)
class ErrorWeight:
    """A model's weight in an objective; all models count the same by default."""

    weight: float = param(1.0, minimum=0, help="how much this model's errors count")


def shares(weights: Sequence[float], unit: UnitInfo) -> list[float]:
    """Return the weights divided by their sum. Refuse weights that sum to zero."""
    total = sum(weights)
    if abs(total) < ZERO_SUM:
        raise ConfigError(
            f"{unit.key}: the weights {', '.join(f'{w:g}' for w in weights)} sum to {total:g} "
            "and cannot be normalized",
            hint="give this tensor weights with another sum, or switch normalization off",
        )
    return [w / total for w in weights]


def params_shares(params: Sequence[Any], options: object, unit: UnitInfo) -> list[float]:
    """Return the `shares` of the models' weights; a `weights` function for `merge_method`."""
    return shares([p.weight for p in params], unit)


def optional_shares(params: Sequence[Any], options: Any, unit: UnitInfo) -> Sequence[float]:
    """Return the models' weights, divided by their sum if `options.normalize` is set."""
    if options.normalize:
        return params_shares(params, options, unit)
    return [p.weight for p in params]


def weight_sum(weights: Sequence[float]) -> float:
    """Return Σw as a divisor: 1 if it is zero."""
    total = sum(weights)
    return 1.0 if abs(total) < ZERO_SUM else total


def average(inputs: Sequence[ModelTensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return Σ w_i θ_i; without weights the mean."""
    return weighted_sum([i.tensor for i in inputs], weights or [1 / len(inputs)] * len(inputs))


def from_base(base: Tensor, inputs: Sequence[ModelTensor], coefficients: Sequence[float]) -> Tensor:
    """Return θ_0 + Σ c_i (θ_i - θ_0)."""
    tensors = [base, *(i.tensor for i in inputs)]
    return weighted_sum(tensors, [1 - sum(coefficients), *coefficients])


def statistics_of(inputs: Sequence[ModelTensor], unit: UnitInfo) -> list[UnitStatistics] | None:
    """Return every model's statistics of a unit, or None if the unit must be averaged.

    If no model has statistics of the unit (norms, embeddings), there is no remark.
    """
    known = [i.statistics for i in inputs if i.statistics is not None]
    if len(known) == len(inputs):
        return known
    if known:
        missing = ", ".join(i.name for i in inputs if i.statistics is None)
        unit.remark(Remark.AVERAGED, {"why": f"no statistics of {missing}"})
    return None
