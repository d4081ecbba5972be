"""Losses of models trained on natural text, compared package by package."""

from __future__ import annotations

import math

import pytest

from evidence.natural_table import Sums, difference, repaired_models

MERGE: Sums = {"a": (30.0, 10, 4), "b": (80.0, 20, 5)}
REPAIRED: Sums = {"a": (28.0, 10, 4), "b": (72.0, 20, 6)}
SPECIALIST: Sums = {"a": (20.0, 10, 4), "b": (70.0, 20, 6)}


def test_difference_is_clustered_by_package() -> None:
    mean, error = difference(REPAIRED, MERGE)
    assert mean == pytest.approx(-10 / 30)
    # The residuals of the two packages are -2 + 10/3 and -8 + 20/3.
    assert error == pytest.approx(math.sqrt(2 * 2 * (4 / 3) ** 2) / 30)


def test_closed_is_the_share_of_the_gap_to_the_specialists() -> None:
    def line(model: str, sums: Sums) -> dict[str, object]:
        domains = dict.fromkeys(("python", "js", "prose", "general", "math"), sums)
        return {"model": model, "seconds": None, "domains": domains}

    specialists = [line(name, SPECIALIST) for name in ("python", "js", "prose")]
    found = repaired_models([*specialists, line("linear", MERGE), line("linear+refit", REPAIRED)])
    merged, repaired = found
    assert merged.closed == 0.0
    assert repaired.closed == pytest.approx(0.5)  # the gap is 20 of 30 tokens, and 10 are won back
    assert repaired.loss == pytest.approx(100 / 30)
    _, error = difference(REPAIRED, MERGE)
    assert repaired.error == pytest.approx(error / math.sqrt(3) / (20 / 30))
