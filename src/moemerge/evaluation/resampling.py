"""Intervals and p values by drawing problems again.

Problems are the units: samples of one problem are alike, so a problem is drawn with all of them,
and for all models at once, which keeps pairs together. An average over tasks draws the problems
of each task apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL: Final = 0.95
AT_ONCE: Final = 1 << 22  # drawn problems that are in memory together
# Sums of the same numbers in another order differ by rounding, and count as equal.
_TIE: Final = 1e-12


def drawn_means(scores: Array, draws: int, rng: np.random.Generator) -> Array:
    """Means of `scores` (rows, problems) over problems drawn with replacement: (draws, rows).

    Their spread is stretched by √(n / (n − 1)): draws of n problems from n spread less than draws
    of n problems from all there might be.
    """
    n = scores.shape[1]
    parts = []
    for count in _parts(draws, n):
        picks = rng.integers(n, size=(count, n)) + n * np.arange(count)[:, None]
        times = np.bincount(picks.ravel(), minlength=count * n).reshape(count, n)
        parts.append(times @ scores.T / n)
    means: Array = np.concatenate(parts)
    centre: Array = scores.mean(axis=1)
    stretch = math.sqrt(n / (n - 1)) if n > 1 else 1.0
    stretched: Array = centre + (means - centre) * stretch
    return stretched


def flipped_means(differences: Array, draws: int, rng: np.random.Generator) -> Array:
    """Means of `differences` (rows, problems) with signs drawn at random: (draws, rows).

    What they would be if which model is which did not matter.
    """
    n = differences.shape[1]
    parts = []
    for count in _parts(draws, n):
        signs = rng.integers(2, size=(count, n), dtype=np.int8) * 2.0 - 1.0
        parts.append(signs @ differences.T / n)
    return np.concatenate(parts)


def interval(drawn: Array) -> tuple[float, float]:
    """The middle `LEVEL` of draws."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def two_sided(observed: float, flipped: Array) -> float:
    """The share of draws that are as far from zero as what was observed, which counts as one."""
    as_far = np.count_nonzero(np.abs(flipped) >= abs(observed) - _TIE)
    return (1 + int(as_far)) / (1 + len(flipped))


def weighted(parts: Sequence[Array], weights: Sequence[float]) -> Array:
    """Draws of an average over tasks, from those of each task."""
    total = np.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        total += weight * part
    return total


def _parts(draws: int, n: int) -> Iterator[int]:
    most = max(1, AT_ONCE // max(n, 1))
    for begun in range(0, draws, most):
        yield min(most, draws - begun)
