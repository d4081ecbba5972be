"""Singular directions of a matrix, and sets of directions made orthogonal. Float64 throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.merging.methods._polar import by_products, polar_factor
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Singular values below this share of the largest are rounding of float32 inputs, not directions.
_RANK_TOLERANCE = 1e-6
# Directions found by dividing by a singular value are orthogonal to ε over the square of its share
# of the largest: down to this share, to 1e-10.
_WELL_FOUND = 1e-3


@dataclass(frozen=True)
class Spectrum:
    """A matrix as U diag(s) Vᵀ, cut at its numerical rank; s descending."""

    left: Tensor  # (out, rank)
    values: Tensor  # (rank,)
    right: Tensor  # (in, rank)
    # Columns that, with `left`, make an orthonormal basis of the outputs; None where not known.
    rest: Tensor | None = None

    @classmethod
    def of(cls, matrix: Tensor, size: float = 0.0, most: int | None = None) -> Spectrum:
        """By eigenvectors of the smaller Gram matrix, which in float64 resolve all that float32
        inputs hold and are several times faster than a singular value decomposition.

        `size` is that of the numbers which the matrix is a small rest of, where it is one; `most`
        the number of directions that are wanted at all.
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
        if turned:
            return cls(long, values, short)
        return cls(short, values, long, vectors[:, count:])

    def top(self, count: int) -> Spectrum:
        """The leading directions alone."""
        return Spectrum(self.left[:, :count], self.values[:count], self.right[:, :count])

    @property
    def well_found(self) -> bool:
        """Whether both sides are orthonormal far below float32's rounding."""
        return not len(self.values) or bool(self.values[-1] >= _WELL_FOUND * self.values[0])


def flattened(matrix: Tensor) -> Tensor | None:
    """mean(s) U Vᵀ over the singular directions that a matrix has; None where it has none."""
    factor = polar_factor(matrix) if by_products(matrix) else None
    if factor is not None:
        strength = (factor * matrix).sum() / min(matrix.shape)  # ⟨U Vᵀ, A⟩ = Σ s
        return strength * factor
    spectrum = Spectrum.of(matrix)
    if not len(spectrum.values):
        return None
    return spectrum.values.mean() * (spectrum.left @ spectrum.right.T)


def orthogonal_sides(spectra: Sequence[Spectrum]) -> tuple[Tensor, Tensor]:
    """The left sides of several spectra next to each other, made orthogonal, and the right ones."""
    well = [spectrum.well_found for spectrum in spectra]
    left, right = [s.left for s in spectra], [s.right for s in spectra]
    return _orthogonal(left, well), _orthogonal(right, well)


def _orthogonal(blocks: Sequence[Tensor], well: Sequence[bool]) -> Tensor:
    """The polar factor of the blocks side by side, by the cheapest way that there is.

    `well` tells which blocks have orthonormal columns.
    """
    together = torch.cat([*blocks], dim=1)
    factor = polar_factor(together) if by_products(together) else None
    if factor is not None:
        return factor
    first, others = blocks[0], torch.cat([blocks[0][:, :0], *blocks[1:]], dim=1)
    if len(blocks) == 2 and all(well) and min(first.shape[1], others.shape[1]):
        return _of_two(first, others)
    if well[0] and others.shape[1] and others.shape[1] < first.shape[1]:
        return _of_one_and_few(first, others)
    return nearest_orthogonal(together)


def nearest_orthogonal(columns: Tensor) -> Tensor:
    """The polar factor: the matrix with orthonormal columns nearest to this one.

    U (UᵀU)^(-1/2); directions that the columns span twice are taken once.
    """
    if columns.shape[1] == 0:
        return columns
    return torch.mm(columns, _inverse_root(columns.T @ columns, columns.shape[1]))


def _inverse_root(gram: Tensor, count: int) -> Tensor:
    """G^(-1/2) on its range, for the Gram matrix of so many unit columns."""
    squares, vectors = torch.linalg.eigh(gram)
    tolerance = float(squares[-1]) * _resolved(count)
    inverse = torch.where(squares > tolerance, squares.clamp_min(tolerance).rsqrt(), 0.0)
    return torch.mm(vectors * inverse, vectors.T)


def _resolved(count: int) -> float:
    """Unit columns: their Gram matrix is known to float64's precision times its size."""
    return count * torch.finfo(torch.float64).eps * 8


def _of_two(U1: Tensor, U2: Tensor) -> Tensor:
    """The polar factor of [U1 U2], each with orthonormal columns, by eigenvectors half as large.

    With A = U1ᵀU2 and AᵀA = V diag(s²) Vᵀ, the Gram matrix has the eigenvalues 1 ± s, and its
    inverse root is [[I + A V g VᵀAᵀ, A V h Vᵀ], [V h VᵀAᵀ, V f Vᵀ]], f ± s h = (1 ± s)^(-1/2) and
    f = 1 + s² g. Written without differences of nearly equal numbers.
    """
    A = U1.T @ U2
    squares, V = torch.linalg.eigh(A.T @ A)
    s = squares.clamp(0, 1).sqrt()
    a, b = (1 + s).sqrt(), (1 - s).clamp_min(0).sqrt()
    twice = 1 - s <= 2 * _resolved(U1.shape[1] + U2.shape[1])  # a direction that both sides span
    b = torch.where(twice, 1.0, b)
    c = a * b
    f = torch.where(twice, 0.5 / a, (a + b) / (2 * c))
    h = torch.where(twice, 0.5 / (a * s.clamp_min(0.5)), -1 / ((a + b) * c))
    g = (1 + 2 * c) / (c * (1 + c) * ((2 + 2 * c).sqrt() + 2 * c))
    g = torch.where(twice, (f - 1) / s.clamp_min(0.5).square(), g)
    B = A @ V  # (first, second)
    P1, P2 = U1 @ B, U2 @ V  # (rows, second)
    return torch.cat([U1 + (P1 * g + P2 * h) @ B.T, (P1 * h + P2 * f) @ V.T], dim=1)


def _of_one_and_few(U: Tensor, R: Tensor) -> Tensor:
    """The polar factor of [U R], U with orthonormal columns, and R with fewer unit columns.

    The Gram matrix is the identity but on Z = [[Q, 0], [0, I]] with UᵀR = Q K, which is twice as
    wide as R: its inverse root is I + Z (N - I) Zᵀ, N that of [[I, K], [Kᵀ, RᵀR]].
    """
    Q, K = torch.linalg.qr(U.T @ R)
    few = R.shape[1]
    eye = torch.eye(few, dtype=U.dtype, device=U.device)
    gram = torch.cat([torch.cat([eye, K], dim=1), torch.cat([K.T, R.T @ R], dim=1)])
    UQ = U @ Q  # (rows, few)
    Y = torch.cat([UQ, R], dim=1) @ _inverse_root(gram, U.shape[1] + few)
    return torch.cat([U + (Y[:, :few] - UQ) @ Q.T, Y[:, few:]], dim=1)
