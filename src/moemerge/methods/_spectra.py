"""Singular vectors of matrices, and polar factors that make sets of them orthogonal. In float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor


# Singular values below this fraction of the largest are rounding error of float32 inputs.
_RANK_TOLERANCE = 1e-6
# Singular vectors computed by dividing by a singular value are orthogonal to ε / fraction², where
# `fraction` is relative to the largest value. Above this fraction, they are orthogonal to 1e-10.
_WELL_FOUND = 1e-3


@dataclass(frozen=True)
class Spectrum:
    """A matrix as U diag(s) Vᵀ, truncated to its numerical rank; s descending."""

    left: Tensor  # (out, rank)
    values: Tensor  # (rank,)
    right: Tensor  # (in, rank)
    # Columns that complete `left` to an orthonormal basis of the outputs; None if not computed.
    rest: Tensor | None = None

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
        if turned:
            return cls(long, values, short)
        return cls(short, values, long, vectors[:, count:])

    @property
    def well_found(self) -> bool:
        """Return whether both sides are orthonormal far below float32's rounding error."""
        return not len(self.values) or bool(self.values[-1] >= _WELL_FOUND * self.values[0])


def flattened(matrix: Tensor) -> Tensor | None:
    """Return mean(s) U Vᵀ over a matrix's singular directions; None for a zero matrix."""
    factor = _by_products(matrix)
    if factor is not None:
        strength = (factor * matrix).sum() / min(matrix.shape)  # ⟨U Vᵀ, A⟩ = Σ s
        return strength * factor
    spectrum = Spectrum.of(matrix)
    if not len(spectrum.values):
        return None
    return spectrum.values.mean() * (spectrum.left @ spectrum.right.T)


def orthogonal_sides(spectra: Sequence[Spectrum]) -> tuple[Tensor, Tensor]:
    """Return the concatenated left sides, made orthogonal, and likewise the right sides."""
    well = [spectrum.well_found for spectrum in spectra]
    left, right = [s.left for s in spectra], [s.right for s in spectra]
    return _orthogonal(left, well), _orthogonal(right, well)


def _orthogonal(blocks: Sequence[Tensor], well: Sequence[bool]) -> Tensor:
    """Return the polar factor of the concatenated blocks, by the cheapest available algorithm.

    `well` marks the blocks with orthonormal columns.
    """
    together = torch.cat([*blocks], dim=1)
    factor = _by_products(together)
    if factor is not None:
        return factor
    first, others = blocks[0], torch.cat([blocks[0][:, :0], *blocks[1:]], dim=1)
    if len(blocks) == 2 and all(well) and min(first.shape[1], others.shape[1]):
        return _of_two(first, others)
    if well[0] and others.shape[1] and others.shape[1] < first.shape[1]:
        return _of_one_and_few(first, others)
    return nearest_orthogonal(together)


def nearest_orthogonal(columns: Tensor) -> Tensor:
    """Return the polar factor U (UᵀU)^(-1/2), the nearest matrix with orthonormal columns.

    Directions that the columns span twice count once.
    """
    if columns.shape[1] == 0:
        return columns
    return torch.mm(columns, _inverse_root(columns.T @ columns, columns.shape[1]))


def _inverse_root(gram: Tensor, count: int) -> Tensor:
    """Return G^(-1/2) on its range, for the Gram matrix of `count` unit columns."""
    squares, vectors = torch.linalg.eigh(gram)
    tolerance = float(squares[-1]) * _resolved(count)
    inverse = torch.where(squares > tolerance, squares.clamp_min(tolerance).rsqrt(), 0.0)
    return torch.mm(vectors * inverse, vectors.T)


def _resolved(count: int) -> float:
    """Return the relative precision of the Gram matrix of `count` unit columns."""
    return count * torch.finfo(torch.float64).eps * 8


def _of_two(U1: Tensor, U2: Tensor) -> Tensor:
    """Return the polar factor of [U1 U2], each orthonormal, by a half-size eigenproblem.

    With A = U1ᵀU2 and AᵀA = V diag(s²) Vᵀ, the Gram matrix has the eigenvalues 1 ± s. Its inverse
    root is [[I + A V g VᵀAᵀ, A V h Vᵀ], [V h VᵀAᵀ, V f Vᵀ]], f ± s h = (1 ± s)^(-1/2) and
    f = 1 + s² g. The formulas avoid differences of nearly equal numbers.
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
    """Return the polar factor of [U R]; U has orthonormal columns, R fewer unit columns.

    The Gram matrix is the identity except on Z = [[Q, 0], [0, I]] with UᵀR = Q K, twice as wide as
    R. Its inverse root is I + Z (N - I) Zᵀ, where N is that of [[I, K], [Kᵀ, RᵀR]].
    """
    Q, K = torch.linalg.qr(U.T @ R)
    few = R.shape[1]
    eye = torch.eye(few, dtype=U.dtype, device=U.device)
    gram = torch.cat([torch.cat([eye, K], dim=1), torch.cat([K.T, R.T @ R], dim=1)])
    UQ = U @ Q  # (rows, few)
    Y = torch.cat([UQ, R], dim=1) @ _inverse_root(gram, U.shape[1] + few)
    return torch.cat([U + (Y[:, :few] - UQ) @ Q.T, Y[:, few:]], dim=1)


# --- polar factors by matrix products -------------------------------------------------------------

# On these devices, from this size on, products take a tenth of a decomposition's time.
PRODUCTS_ON = frozenset({"cuda"})
FEWEST = 128
# Smallest fraction of the largest singular value; below it, a decomposition must decide the rank.
_LEAST = 2e-6
# A smaller error becomes rounding error in the next step, which cubes it.
_NEARLY = 1e-5
_MOST_STEPS = 30
# Largest deviation from orthonormality per column: a few hundred rounding errors.
_ORTHONORMAL = 1e-12


def _by_products(matrix: Tensor) -> Tensor | None:
    """Return the polar factor if products are faster for this shape and device, else None."""
    faster = matrix.device.type in PRODUCTS_ON and min(matrix.shape) >= FEWEST
    return polar_factor(matrix) if faster else None


def polar_factor(matrix: Tensor) -> Tensor | None:
    """Return U Vᵀ of U diag(s) Vᵀ in float64; None if the matrix may be rank-deficient.

    X ← (a I + b W + c W²) X with W = X Xᵀ maps every singular value s to a s + b s³ + c s⁵. The
    coefficients are the best approximation of 1 on the remaining interval.
    """
    wide = matrix.double()
    turned = wide.shape[0] > wide.shape[1]
    wide = wide.T if turned else wide  # (short, long)
    known = Definite.of(wide @ wide.T)
    if not known.surely(_LEAST):
        return None
    X = wide / known.most
    for a, b, c in _steps(1 + int(math.log2(known.most / known.least))):
        W = X @ X.T  # (short, short)
        W = torch.addmm(W, W, W, beta=b, alpha=c)
        W.diagonal().add_(a)
        X = W @ X
    off = X @ X.T
    off.diagonal().sub_(1)
    if not float(torch.linalg.vector_norm(off)) <= _ORTHONORMAL * len(off):
        return None
    return X.T if turned else X


@dataclass(frozen=True)
class Definite:
    """The Cholesky factor of a Gram matrix A Aᵀ, and bounds of A's singular values."""

    lower: Tensor
    least: float  # lower bound; 0 if a singular value may be zero
    most: float  # upper bound

    @classmethod
    def of(cls, gram: Tensor) -> Definite:
        """Factor a Gram matrix.

        Σ s⁴ is the squared norm of the matrix, and Σ s⁻² that of its inverse Cholesky factor.
        """
        lower, failed = torch.linalg.cholesky_ex(gram)
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        norms = [torch.linalg.vector_norm(inverse), torch.linalg.vector_norm(gram)]
        high, squares, not_definite = torch.stack([*norms, failed.to(gram.dtype)]).tolist()
        known = not not_definite and 0 < high < math.inf
        return cls(lower, 1 / high if known else 0.0, math.sqrt(squares))

    def surely(self, share: float) -> bool:
        """Return whether every singular value exceeds this fraction of the largest."""
        return self.least > share * self.most  # False for NaN

    def solve(self, right: Tensor) -> Tensor:
        """Return X with X A Aᵀ = right."""
        return torch.cholesky_solve(right.T, self.lower).T


@functools.cache
def _steps(halvings: int) -> tuple[tuple[float, float, float], ...]:
    """Return odd quintic polynomials whose composition maps [2^-halvings, 1] to 1.

    Each is the best approximation on the interval that the previous one leaves. Its error is
    equal in size and alternates in sign at both ends and at the two extrema between.
    """
    low, high = 2.0**-halvings, 1.0
    steps: list[tuple[float, float, float]] = []
    while len(steps) < _MOST_STEPS:
        a, b, c, error = _best_quintic(low, high)
        steps.append((a, b, c))
        if error < _NEARLY:
            break
        low, high = 1 - error, 1 + error
    return (*steps, (15 / 8, -10 / 8, 3 / 8))


def _best_quintic(low: float, high: float) -> tuple[float, float, float, float]:
    """Return a, b, c and the error of a x + b x³ + c x⁵ ≈ 1 on [low, high], by Remez exchange."""
    inner = [low + 0.3 * (high - low), low + 0.75 * (high - low)]
    signs = np.array([1.0, -1.0, 1.0, -1.0])
    for _ in range(100):
        x = np.array([low, *inner, high])
        a, b, c, error = np.linalg.solve(np.stack([x, x**3, x**5, signs], 1), np.ones(4)).tolist()
        root = math.sqrt(max(9 * b * b - 20 * a * c, 0.0))
        extrema = [math.sqrt(max((-3 * b - s * root) / (10 * c), 0.0)) for s in (1, -1)]
        moved = max(abs(x - y) for x, y in zip(inner, extrema, strict=True))
        inner = extrema
        if moved < 1e-13 * high:
            break
    return a, b, c, abs(error)
