"""Polar factors by products alone: on a GPU these take a tenth of a decomposition's time."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

# Devices on which products are so much faster than decompositions, and from which size on.
PRODUCTS_ON = frozenset({"cuda"})
FEWEST = 128
# Of the largest singular value: below it, it is for a decomposition to say what the rank is.
_LEAST = 2e-6
# A step that leaves less than this has its cube, which is rounding, left by the next.
_NEARLY = 1e-5
_MOST_STEPS = 30
# How far from orthonormal the result may be, a column: a few hundred roundings.
_ORTHONORMAL = 1e-12


def by_products(matrix: Tensor) -> bool:
    """Whether products are the faster way for a matrix of this shape, where it lies."""
    return matrix.device.type in PRODUCTS_ON and min(matrix.shape) >= FEWEST


def polar_factor(matrix: Tensor) -> Tensor | None:
    """U Vᵀ of a matrix U diag(s) Vᵀ of full rank, in float64; None where it may not have full rank.

    X ← (a I + b W + c W²) X with W = X Xᵀ takes every singular value s to a s + b s³ + c s⁵, and
    the coefficients are those that come closest to 1 wherever the values may still be.
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
    """A Gram matrix A Aᵀ by its Cholesky factor, and bounds of A's singular values."""

    lower: Tensor
    least: float  # no singular value is less; 0 where one may vanish
    most: float  # none is more

    @classmethod
    def of(cls, gram: Tensor) -> Definite:
        """Σ s⁴ is the sum of the matrix's squares, Σ s⁻² that of its inverse Cholesky factor's."""
        lower, failed = torch.linalg.cholesky_ex(gram)
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        norms = [torch.linalg.vector_norm(inverse), torch.linalg.vector_norm(gram)]
        high, squares, not_definite = torch.stack([*norms, failed.to(gram.dtype)]).tolist()
        known = not not_definite and 0 < high < math.inf
        return cls(lower, 1 / high if known else 0.0, math.sqrt(squares))

    def surely(self, share: float) -> bool:
        """Whether every singular value is more than this share of the largest."""
        return self.least > share * self.most  # never, where something is not a number

    def solve(self, right: Tensor) -> Tensor:
        """X of X A Aᵀ = right."""
        return torch.cholesky_solve(right.T, self.lower).T


@functools.cache
def _steps(halvings: int) -> tuple[tuple[float, float, float], ...]:
    """Odd polynomials of degree five that take [2^-halvings, 1] to 1, one after the other.

    Each is the best for the interval that the one before it leaves: its error has the same size and
    alternating signs at both ends and at its two extrema between them.
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
    """a, b, c and the error of a x + b x³ + c x⁵ ≈ 1 on [low, high], by Remez' exchange."""
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
