"""Symmetric matrices at little more than half their size: block rows of the upper triangle.

Row blocks instead of single rows, so that packing and unpacking are copies of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


BLOCK = 128  # rows; part of the file format


def packed_size(width: int) -> int:
    """Elements that `pack` makes of a (width, width) matrix."""
    return sum(rows * (width - start) for start, rows in _blocks(width))


def pack(matrix: Tensor) -> Tensor:
    """(n, n), symmetric -> (packed_size(n),)."""
    width = matrix.shape[0]
    out = torch.empty(packed_size(width), dtype=matrix.dtype, device=matrix.device)
    at = 0
    for start, rows in _blocks(width):
        size = rows * (width - start)
        out[at : at + size].view(rows, width - start).copy_(matrix[start : start + rows, start:])
        at += size
    return out


def unpack(packed: Tensor, width: int) -> Tensor:
    """(packed_size(n),) -> (n, n)."""
    out = torch.empty((width, width), dtype=packed.dtype, device=packed.device)
    at = 0
    for start, rows in _blocks(width):
        size = rows * (width - start)
        block = packed[at : at + size].view(rows, width - start)
        out[start : start + rows, start:] = block
        out[start + rows :, start : start + rows] = block[:, rows:].T
        at += size
    return out


def _blocks(width: int) -> Iterator[tuple[int, int]]:
    for start in range(0, width, BLOCK):
        yield start, min(BLOCK, width - start)
