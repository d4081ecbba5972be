"""What a refit did to the routing on rows held out, in report, card and table."""

import json

from moemerge.cli.repair_tables import refit_report
from moemerge.repairs.refit_report import few_tokens
from moemerge.runtime.formatting import Quantity
from moemerge.runtime.progress import Silent
from repairs.calibration.cases import assert_as_diagnosed
from terminal import printed


def shown(report, width, *, verbose=False):
    return printed(refit_report(report, verbose=verbose), width)


def test_it_is_what_diagnose_measures(case, tmp_path):
    out = tmp_path / "out"
    report = case.refit(out)
    figures = report.diagnosis
    assert figures is not None
    assert figures["tokens"] == report.held_out_tokens
    assert_as_diagnosed(case, figures, out, holdout=0.1)
    written = json.loads((out / "moemerge_report.json").read_text())
    assert written["refit"]["diagnosis"] == figures
    card = (out / "README.md").read_text().partition("## Refit")[2].partition("## Config")[0]
    row = f"| math | {figures['tokens']['math']} | {figures['mismatch_before']['math']:.1%} | "
    assert row in card.partition("rows held out from the fit, used to choose")[2]
    on = "(rows held out from the fit, used to choose its settings and the maps that change; each"
    assert on in shown(report, 200)
    narrow, verbose = shown(report, 30), shown(report, 40, verbose=True)
    for layer in report.layers[:2]:
        for name in case.sources:
            ends = (layer["drift_before"][name], layer["drift_after"][name])
            assert "→".join(map(Quantity.RATIO.text, ends)) in narrow
    assert "…" not in narrow + verbose


def test_what_cannot_be_added_to_the_card_is_told(case, tmp_path):
    """OUT is whole by then: its weights, report and card stand."""
    out, notes = tmp_path / "out", []

    class Sabotaged(Silent):
        def start(self, what, total, *, unit):
            card = out / "README.md"
            if card.is_file():  # OUT has appeared, and is being measured
                card.rename(out / "CARD.md")
                card.mkdir()

        def note(self, message):
            notes.append(message)

    report = case.refit(out, ridge=0.01, router="keep", progress=Sabotaged())
    assert report.diagnosis is not None
    assert any("lacks the figures measured on held-out rows" in note for note in notes)
    assert json.loads((out / "moemerge_report.json").read_text())["refit"]["diagnosis"]
    assert "linear maps refitted to the sources" in (out / "CARD.md").read_text()


def _layers(linear, experts):
    """A layer whose map has 8 inputs, and whose experts have 8 and then 4."""
    return [
        {
            "layer": 3,
            "maps": [
                {"map": "layers.3.q.weight", "inputs": 8, "tokens": linear},
                {"router": "layers.3.gate.weight", "tokens": {"math": 1}},
                {"map": "layers.3.experts.up", "inputs": 8, "experts": {"tokens": experts}},
                {"map": "layers.3.experts.down", "inputs": 4, "experts": {"tokens": experts}},
            ],
        }
    ]


def test_enough_tokens_need_no_word():
    assert few_tokens(_layers(32, [32, 36])) == []


def test_few_tokens_are_named_and_counted():
    """Five tokens determine the second projection of expert 1, with 4 inputs, not the first."""
    assert few_tokens(_layers(40, [40, 5, 32])) == [
        "1 of 4 maps and experts reached by fewer tokens than inputs, which cannot determine them: "
        "layer 3 expert 1 (5 of 8); more text helps"
    ]


def test_text_that_is_too_short_for_most_maps():
    """Shares of tokens for each input: 9/8, 0, 3/8, 3/8, 5/8; the middle asks for 32/3 of it."""
    named, short = few_tokens(_layers(9, [0, 3, 3, 5]))
    assert named.startswith("4 of 5 maps and experts")
    assert "layer 3 expert 0 (0 of 8), layer 3 expert 1 (3 of 8)" in named
    assert "the result may be worse than the merge: give at least 11 times as much" in short
    assert "give far more" in few_tokens(_layers(9, [0, 0, 0]))[-1]
    (short,) = few_tokens(_layers(31, [31, 31]))  # every map is determined, barely
    assert "give at least 2 times as much" in short
