"""Truncated singular value decompositions in row blocks, so that no large matrix is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Directions below this share of the largest squared singular value are rounding error.
_NOISE = 1e-14

Blocks = Callable[[], Iterable[Tensor]]  # the rows of a matrix, in order; may be called twice


@dataclass(frozen=True)
class Factors:
    """B A, the best approximation of its rank; the singular values are shared evenly."""

    b: Tensor  # (out, rank)
    a: Tensor  # (rank, in)

    def to(self, dtype: torch.dtype) -> Factors:
        return Factors(self.b.to(dtype), self.a.to(dtype))


def factorise(
    blocks: Blocks, shape: tuple[int, int], most: int, energy: float | None
) -> Factors | None:
    """Return the leading singular directions of a matrix; None for a zero matrix.

    They are eigenvectors of its smaller Gram matrix. In float64 these resolve everything in
    float32 inputs. Only a tall matrix may come in several blocks.
    """
    tall = shape[0] >= shape[1]
    changed = (block.double() for block in blocks() if bool(block.any()))
    gram = sum(d.T @ d if tall else d @ d.T for d in changed)
    if not isinstance(gram, Tensor):
        return None
    squares, vectors = torch.linalg.eigh(gram)
    squares, vectors = squares.flip(0).clamp_min(0), vectors.flip(1)
    if not bool(squares[0] > 0):
        return None
    count = int((squares > _NOISE * squares[0]).sum())
    if energy is not None:
        kept = squares.cumsum(0) / squares.sum()
        count = min(count, 1 + int((kept < energy - _NOISE).sum()))
    count = min(count, most)
    short = vectors[:, :count]
    scale = squares[:count] ** 0.25  # the square root of the singular values
    if tall:
        b = torch.cat([(block.double() @ (short / scale)).float() for block in blocks()])
        return Factors(b, (short * scale).T.float())
    (block,) = blocks()
    a = (short / scale).T @ block.double()
    return Factors((short * scale).float(), a.float())
