"""Weights that are divided by their sum."""

from __future__ import annotations

from collections.abc import Sequence

from moemerge.errors import ConfigError
from moemerge.merging.method import UnitInfo

_ZERO_SUM = 1e-8


def shares(weights: Sequence[float], unit: UnitInfo) -> list[float]:
    """Weights that sum to one; refuses those that sum to nought, which would divide by it."""
    total = sum(weights)
    if abs(total) < _ZERO_SUM:
        raise ConfigError(
            f"{unit.key}: the weights {', '.join(f'{w:g}' for w in weights)} sum to {total:g} "
            "and cannot be normalized",
            hint="give this tensor weights with another sum, or switch normalization off",
        )
    return [w / total for w in weights]
