"""Names are cut to what tells them apart; numbers have the digits that matter."""

import pytest

from moemerge.runtime.formatting import (
    FigureWords,
    Quantity,
    display_names,
    layers_in_words,
    percent,
    perplexity,
    plain,
    short,
)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["demo/out/wudi-calibrated"], ["wudi-calibrated"]),
        (["merged/", "out/calibrated"], ["merged", "calibrated"]),
        (["org/a@main", "other/b"], ["a@main", "b"]),
        (["runs/a/merged", "runs/b/merged"], ["a/merged", "b/merged"]),
        (["merged", "old/merged"], ["merged", "old/merged"]),
        (["org/base+me/lora", "org/base"], ["base+lora", "base"]),
        (["the merge before calibration", "out"], ["the merge before calibration", "out"]),
        (["same", "same"], ["same", "same"]),
        (["out", "out/"], ["out", "out/"]),
        (["/"], ["/"]),
        ([], []),
    ],
)
def test_display_names(labels, names):
    assert display_names(labels) == names


def test_numbers_and_labels_for_people():
    assert [percent(v) for v in (0.1234, 0.00123, 0.0, 1.0, None)] == [
        "12.3%", "0.12%", "0.0%", "100.0%", "–",
    ]  # fmt: skip
    assert [plain(v) for v in (12.345, 0.01234, 1234.5, 0.0, 1.2e-6, -0.5)] == [
        "12.3", "0.0123", "1234", "0", "1.20e-6", "-0.500",
    ]  # fmt: skip
    assert short("a/very/long/path/to/a/model", 12) == "a/ve…a/model"
    assert layers_in_words([3]) == "layer 3"
    assert layers_in_words([0, 1, 2, 5]) == "layers 0–2, 5"
    assert layers_in_words([0, 2, 4, 6, 8]) == "5 layers"


def test_a_quantity_says_how_its_value_is_written():
    texts = {
        Quantity.SHARE: "12.3%",
        Quantity.NATS: "0.123",
        Quantity.LOSS: "0.123",
        Quantity.RATIO: "0.123",
        Quantity.COUNT: "0.1",
    }
    assert {quantity: quantity.text(0.1234) for quantity in texts} == texts
    assert Quantity.COUNT.text(7.0) == "7"
    assert Quantity.EXPERTS.text([3, 4]) == "2"
    assert Quantity.LOSS.text(2) == "2.000"
    assert {quantity.text(None) for quantity in Quantity} == {"–"}
    assert Quantity.NATS.text(float("nan")) == "–"
    assert perplexity(2.0) == pytest.approx(7.389, abs=1e-3)
    assert 1e300 < perplexity(1e9) < float("inf")


def test_a_figure_may_be_a_part_of_another():
    figure = FigureWords("lost", "lost", "choices lost", Quantity.COUNT, out_of="all")
    assert figure.text({"lost": 4.25, "all": 16}) == "4.2/16"
    assert figure.text({"lost": 4.25}) == "4.2"
    assert FigureWords.from_json({**figure.to_json(), "from a newer version": 1}) == figure
