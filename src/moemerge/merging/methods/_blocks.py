"""Flat views in canonical order, walked in pieces that stay in a core's cache.

A merge unit has a few million elements; a formula of a dozen elementwise steps over all of it
would go to memory a dozen times. Every kernel here works on blocks and reuses its scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# 256 Ki float32 are 1 MiB: a kernel's scratch stays near the core, while threads that
# work side by side do not meet at the interpreter's lock after every few microseconds.
CPU_BLOCK = 1 << 18
# An accelerator wants one large launch; a power of two keeps blocks inside one 2^32 range.
DEVICE_BLOCK = 1 << 28

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
_SIGN_BITS = {torch.float32: -(1 << 31), torch.float64: -(1 << 63)}


def flat(tensor: Tensor) -> Tensor:
    """All elements in canonical (out, in) order; a copy only where a view is not contiguous."""
    return tensor.reshape(-1)


def block_size(device: torch.device) -> int:
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


def blocks(tensor: Tensor) -> Iterator[slice]:
    """Slices that cover a flat tensor, each small enough for its device's cache."""
    step = block_size(tensor.device)
    for start in range(0, tensor.numel(), step):
        yield slice(start, min(start + step, tensor.numel()))


def scratch(like: Tensor, count: int) -> list[Tensor]:
    """`count` uninitialised buffers as long as the longest block of `like`."""
    length = min(like.numel(), block_size(like.device))
    return [like.new_empty(length) for _ in range(count)]


def bits(values: Tensor) -> Tensor:
    """The same memory as signed integers."""
    return values.view(_INTEGERS[values.dtype])


def sign_bit(dtype: torch.dtype) -> int:
    """The integer that has only the sign bit of `dtype` set."""
    return _SIGN_BITS[dtype]


def magnitude(block: Tensor) -> float:
    """Σ|v| of one block."""
    return float(block.abs().sum())


def total_magnitude(values: Tensor) -> float:
    """Σ|v| of a flat tensor; blocks are added in float64."""
    return sum(magnitude(values[b]) for b in blocks(values))


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_i x_i in the tensors' shape, as a new contiguous tensor."""
    flats = [flat(t) for t in tensors]
    out = torch.empty_like(flats[0])
    for b in blocks(out):
        block = torch.mul(flats[0][b], weights[0], out=out[b])
        for x, weight in zip(flats[1:], weights[1:], strict=True):
            block.add_(x[b], alpha=weight)
    return out.view(tensors[0].shape)
