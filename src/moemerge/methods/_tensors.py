"""Sums, inner products and angles of tensors, and weights that sum to one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from moemerge.errors import ConfigError
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

ZERO_SUM = 1e-8  # a smaller sum of weights counts as zero
# A shorter sum of unit vectors has no direction: in float32 it is rounding error.
NO_DIRECTION = 1e-6
# A dozen steps on chunks of this size stay in a core's cache instead of going to memory each time.
# An accelerator needs one large launch.
CPU_CHUNK = 1 << 17
DEVICE_CHUNK = 1 << 28


def row_chunks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of a flat (rows, columns) matrix that hold whole rows and fit into the cache."""
    size = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    step = max(1, size // max(1, columns)) * columns
    for start in range(0, rows * columns, max(1, step)):
        yield slice(start, min(start + step, rows * columns))


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape as that of a matrix; a vector is one row."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // max(1, rows)


def shares(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum. Refuse weights that sum to zero."""
    total = sum(weights)
    if abs(total) < ZERO_SUM:
        raise ConfigError(
            f"the weights {', '.join(f'{w:g}' for w in weights)} sum to {total:g} "
            "and cannot be normalized",
            hint="give this tensor weights with another sum, or switch normalization off",
        )
    return [w / total for w in weights]


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w_i x_i as a new tensor."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total


def average(tensors: Sequence[Tensor]) -> Tensor:
    return weighted_sum(tensors, [1 / len(tensors)] * len(tensors))


def gram(tensors: Sequence[Tensor]) -> Tensor:
    """Return G_ij = x_i·x_j in float64 on the CPU."""
    flats = [tensor.reshape(-1) for tensor in tensors]
    total = torch.zeros(len(flats), len(flats), dtype=torch.float64, device=flats[0].device)
    for at in row_chunks(flats[0].numel(), 1, flats[0].device):
        rows = torch.stack([x[at] for x in flats]).double()
        total += rows @ rows.T
    return total.cpu()


def cosine(g: Tensor, i: int, j: int) -> float:
    """Return the cosine of x_i and x_j from their Gram matrix; 0 for a zero vector."""
    norms = math.sqrt(g[i, i].item() * g[j, j].item())
    return max(-1.0, min(1.0, g[i, j].item() / norms)) if norms > 0 else 0.0
