"""The few statistics a table of seeds needs: standard errors and paired tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# The continued fraction of the incomplete beta function converges in well under this many terms.
_TERMS = 400
_TINY = 1e-300


@dataclass(frozen=True)
class Mean:
    """A mean over seeds; `error` is its standard error, None for a single value."""

    value: float
    error: float | None
    count: int


@dataclass(frozen=True)
class PairedTest:
    """Second minus first, pair by pair. `p` is two-sided; None where it cannot be told."""

    difference: Mean
    p: float | None
    wins: int  # pairs in which the second is larger
    losses: int


@dataclass(frozen=True)
class McNemar:
    """Problems that only one of two models solves, and how likely such a split is by chance."""

    gained: int  # solved by the second alone
    lost: int  # solved by the first alone
    p: float


def mean(values: Sequence[float]) -> Mean:
    """Mean and standard error (of the sample, n - 1)."""
    n = len(values)
    middle = math.fsum(values) / n
    if n < 2:
        return Mean(middle, None, n)
    variance = math.fsum((v - middle) ** 2 for v in values) / (n - 1)
    return Mean(middle, math.sqrt(variance / n), n)


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
    """McNemar's exact test: of the problems where two models differ, who solves them."""
    pairs = list(zip(first, second, strict=True))
    gained = sum(b and not a for a, b in pairs)
    lost = sum(a and not b for a, b in pairs)
    return McNemar(gained, lost, sign_test(gained, lost))


def sign_test(gained: int, lost: int) -> float:
    """Two-sided exact binomial test of `gained` against `lost` at even odds."""
    n, few = gained + lost, min(gained, lost)
    if n == 0:
        return 1.0
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        for k in range(few + 1)
    ]
    return min(1.0, 2 * math.fsum(math.exp(value) for value in logs))


def student_two_sided(t: float, degrees: int) -> float:
    """P(|T| ≥ |t|) of Student's distribution: I_x(ν/2, 1/2) at x = ν / (ν + t²)."""
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side only
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # Lentz's algorithm: numerator and denominator of the convergents, rescaled at each term.
    c, d = 1.0, _away(1 - (a + b) * x / (a + 1))
    d = 1 / d
    value = d
    for m in range(1, _TERMS):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + step * d)
            c = _away(1 + step / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value / a


def _away(number: float) -> float:
    """Not zero: Lentz divides by it."""
    return number if abs(number) > _TINY else _TINY
