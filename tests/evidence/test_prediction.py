"""What diagnose expects of a repair, and losses on natural text, from recorded merges."""

import math
from pathlib import Path

import pytest
import torch

from evidence import swaps
from evidence.natural_table import TokenTexts, difference, repaired_models
from evidence.prediction import (
    FITTED_SEEDS,
    Merge,
    bands,
    expected,
    merges,
)
from evidence.prediction import tested as on_other_seeds
from moemerge.diagnosis.advice import (
    CALIBRATION,
    REFIT,
    SHORTFALL,
    expected_by_swaps,
    expected_of_calibration,
)
from moemerge.diagnosis.verdict import WORTH

CELLS = Path(__file__).parents[2] / "docs" / "data" / "evidence-methods.jsonl.xz"


def test_the_advice_has_the_numbers_of_the_fit():
    found = merges(CELLS)
    fitted = [one for one in found if one.seed in FITTED_SEEDS]
    for below, own in bands(fitted).items():
        fit = expected([one.harc for one in own])
        assert str(fit) == str(CALIBRATION[below])
    assert str(expected([one.refit for one in fitted])) == str(REFIT)
    # Every merge of the paper's six methods and all others, with a gap worth closing.
    assert {one.regime for one in found} == {"soft", "plain"}
    assert len(found) == 840


def test_brackets_and_words_that_are_completed():
    texts = TokenTexts.of(["<pad>", "foo", "bar", " x", ")", "_y", "))"], torch.device("cpu"))
    ids = torch.tensor([[1, 2, 5, 4, 3, 2, 6], [3, 2, 0, 0, 0, 0, 0]])  # foo|bar|_y ) x|bar ))
    right = torch.tensor([[1, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
    assert texts.completed(ids, right).tolist() == [[2, 1, 2, 1], [0, 0, 1, 0]]


def test_a_prediction_is_tested_on_other_seeds():
    low = [Merge("plain", seed, 0.1, 0.0, 0.5) for seed in (0, 0, 1, 2, 3)]
    high = [Merge("soft", seed, 0.6, 0.8, 0.5) for seed in (0, 0, 1, 2, 3)]
    found = [*low, *high, Merge("soft", 4, 0.6, 0.4, 0.5)]
    empty = [Merge("soft", 0, kl, 0.4, 0.5) for kl in (0.2, 0.2, 0.4, 0.4)]
    test = on_other_seeds([*found, *empty], lambda one: one.harc)
    # Two bands are met exactly; the seed-4 merge closes 0.4 where 0.8 is expected.
    assert test.error == pytest.approx(0.4 / 3)
    assert test.inside == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("kl", "band"), [(0.0, 0.15), (0.15, 0.3), (0.49, 0.5), (math.inf, math.inf)]
)
def test_a_band_has_its_lower_edge(kl, band):
    assert expected_of_calibration(kl) is CALIBRATION[band]


def test_swaps_predict_merges_of_more_specialists():
    found = swaps.read(CELLS.with_name("swaps.jsonl"))
    assert str(swaps.shortfall(found)) == str(SHORTFALL)
    others = [one for one in found if one.sources == 3 and one.won_back >= WORTH]
    assert all(abs(expected_by_swaps(one.won_back).share - one.closed) < 0.1 for one in others)
    assert max(one.closed for one in found if one.won_back < WORTH) < 0.01


PLAIN = {"a": (30.0, 10, 4), "b": (80.0, 20, 5)}
REPAIRED = {"a": (28.0, 10, 4), "b": (72.0, 20, 6)}
SPECIALIST = {"a": (20.0, 10, 4), "b": (70.0, 20, 6)}


def test_difference_is_clustered_by_package():
    mean, error = difference(REPAIRED, PLAIN)
    assert mean == pytest.approx(-10 / 30)
    # The residuals of the two packages are -2 + 10/3 and -8 + 20/3.
    assert error == pytest.approx(math.sqrt(2 * 2 * (4 / 3) ** 2) / 30)


def test_closed_is_the_share_of_the_gap_to_the_specialists():
    def line(model, sums):
        domains = dict.fromkeys(("python", "js", "prose", "general", "math"), sums)
        return {"model": model, "seconds": None, "domains": domains}

    specialists = [line(name, SPECIALIST) for name in ("python", "js", "prose")]
    found = repaired_models([*specialists, line("linear", PLAIN), line("linear+refit", REPAIRED)])
    merged, repaired = found
    assert merged.closed == 0.0
    assert repaired.closed == pytest.approx(0.5)  # the gap is 20 of 30 tokens, and 10 are won back
    assert repaired.loss == pytest.approx(100 / 30)
    _, error = difference(REPAIRED, PLAIN)
    assert repaired.error == pytest.approx(error / math.sqrt(3) / (20 / 30))
