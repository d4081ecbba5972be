"""Singular vectors of matrices, and polar factors that make sets of them orthogonal. In float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Singular values below this fraction of the largest are rounding error of float32 inputs.
_RANK_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Spectrum:
    """A matrix as U diag(s) Vᵀ, truncated to its numerical rank; s descending."""

    left: Tensor  # (out, rank)
    values: Tensor  # (rank,)
    right: Tensor  # (in, rank)

    @classmethod
    def of(cls, matrix: Tensor, size: float = 0.0, most: int | None = None) -> Spectrum:
        """Decompose a matrix by the eigenvectors of its smaller Gram matrix.

        In float64 these resolve everything in float32 inputs, several times faster than an SVD.
        If the matrix is a small residual, `size` is the norm of what it is a residual of. `most`
        limits the number of directions.
        """
        wide = matrix.double()
        turned = wide.shape[0] > wide.shape[1]
        wide = wide.T if turned else wide  # (short, long)
        squares, vectors = torch.linalg.eigh(wide @ wide.T)
        squares, vectors = squares.flip(0), vectors.flip(1)
        largest = max(float(squares[0]), size**2)
        rank = int((squares > largest * _RANK_TOLERANCE**2).sum())
        count = rank if most is None else min(rank, most)
        values, short = squares[:count].sqrt(), vectors[:, :count]
        long = (wide.T @ short) / values
        return cls(long, values, short) if turned else cls(short, values, long)


def nearest_orthogonal(columns: Tensor) -> Tensor:
    """Return the polar factor U (UᵀU)^(-1/2), the nearest matrix with orthonormal columns.

    Directions that the columns span twice count once.
    """
    if columns.shape[1] == 0:
        return columns
    left, values, right = torch.linalg.svd(columns.double(), full_matrices=False)
    # The squares of smaller values are rounding error of the columns' inner products.
    kept = values > values[0] * (8 * columns.shape[1] * torch.finfo(values.dtype).eps) ** 0.5
    return torch.mm(left[:, kept], right[kept])
