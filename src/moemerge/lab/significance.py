"""Standard errors, paired tests, bootstrap intervals and p values.

Problems are resampled, not samples: samples of one problem are correlated, so a problem is drawn
with all of its samples and for all models at once. An average over tasks resamples each task
separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; `error` is its standard error, None for a single value."""

    value: float
    error: float | None
    count: int


@dataclass(frozen=True)
class PairedTest:
    """The differences second minus first. `p` is two-sided; None if it is undefined."""

    difference: Mean
    p: float | None
    wins: int  # pairs in which the second is larger
    losses: int


@dataclass(frozen=True)
class McNemar:
    """The number of problems that only one of two models solves, and the p value."""

    gained: int  # solved by the second alone
    lost: int  # solved by the first alone
    p: float


def mean(values: Sequence[float]) -> Mean:
    """Return the mean and its standard error (with n - 1)."""
    n = len(values)
    middle = math.fsum(values) / n
    if n < 2:
        return Mean(middle, None, n)
    variance = math.fsum((v - middle) ** 2 for v in values) / (n - 1)
    return Mean(middle, math.sqrt(variance / n), n)


def weighted_mean(weights: Sequence[float], means: Sequence[Mean]) -> Mean:
    """Return a weighted sum of independent means, with its standard error."""
    value = math.fsum(w * m.value for w, m in zip(weights, means, strict=True))
    squares = [
        (w * m.error) ** 2 for w, m in zip(weights, means, strict=True) if m.error is not None
    ]
    return Mean(value, math.sqrt(math.fsum(squares)) if len(squares) == len(means) else None, 1)


def paired_t(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Student's paired t-test of `second` against `first`."""
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    difference = mean(gaps)
    p = None
    if difference.error is not None:
        if difference.error > 0:
            p = student_two_sided(difference.value / difference.error, difference.count - 1)
        elif difference.value == 0:
            p = 1.0
    return PairedTest(difference, p, sum(g > 0 for g in gaps), sum(g < 0 for g in gaps))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """McNemar's exact test on the problems that only one of two models solves."""
    pairs = list(zip(first, second, strict=True))
    gained = sum(b and not a for a, b in pairs)
    lost = sum(a and not b for a, b in pairs)
    return McNemar(gained, lost, sign_test(gained, lost))


def sign_test(gained: int, lost: int) -> float:
    """Two-sided exact binomial test of `gained` against `lost` at even odds."""
    from scipy.stats import binomtest

    return float(binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def student_two_sided(t: float, degrees: int) -> float:
    """P(|T| ≥ |t|) of Student's distribution."""
    from scipy.special import stdtr

    return float(2 * stdtr(degrees, -abs(t)))


# --- by drawing again -----------------------------------------------------------------------------

Array = NDArray[np.float64]
LEVEL: Final = 0.95
ALPHA: Final = 0.05  # p below which a difference is significant
AT_ONCE: Final = 1 << 22  # resampled problems in memory at once
# Sums of the same numbers in another order differ by rounding, and count as equal.
_TIE: Final = 1e-12


def drawn_means(scores: Array, draws: int, rng: np.random.Generator) -> Array:
    """Return means of `scores` (rows, problems) over problems drawn with replacement: (draws,
    rows).

    Their spread is scaled by √(n / (n − 1)), because resampling n problems from n underestimates
    the variance of the mean.
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
    """Return means of `differences` (rows, problems) with random signs: (draws, rows).

    This is their distribution if the two models were exchangeable.
    """
    n = differences.shape[1]
    parts = []
    for count in _parts(draws, n):
        signs = rng.integers(2, size=(count, n), dtype=np.int8) * 2.0 - 1.0
        parts.append(signs @ differences.T / n)
    return np.concatenate(parts)


def interval(drawn: Array) -> tuple[float, float]:
    """Return the central `LEVEL` of the draws."""
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def two_sided(observed: float, flipped: Array) -> float:
    """Return the share of draws as far from zero as the observation, which counts as one draw."""
    as_far = np.count_nonzero(np.abs(flipped) >= abs(observed) - _TIE)
    return (1 + int(as_far)) / (1 + len(flipped))


def weighted(parts: Sequence[Array], weights: Sequence[float]) -> Array:
    """Return draws of an average over tasks, from those of each task."""
    total = np.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        total += weight * part
    return total


def _parts(draws: int, n: int) -> Iterator[int]:
    most = max(1, AT_ONCE // max(n, 1))
    for begun in range(0, draws, most):
        yield min(most, draws - begun)
