"""What a refit's report says about too little text."""

from __future__ import annotations

from typing import Any

from moemerge.refitting.report import few_tokens


def _layers(linear: int, experts: list[int]) -> list[dict[str, Any]]:
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


def test_enough_tokens_need_no_word() -> None:
    assert few_tokens(_layers(32, [32, 36])) == []


def test_few_tokens_are_named_and_counted() -> None:
    """Five tokens determine the second projection of expert 1, with 4 inputs, not the first."""
    assert few_tokens(_layers(40, [40, 5, 32])) == [
        "1 of 4 maps and experts reached by fewer tokens than inputs, which cannot determine them: "
        "layer 3 expert 1 (5 of 8); more text helps"
    ]


def test_text_that_is_too_short_for_most_maps() -> None:
    """Shares of tokens for each input: 9/8, 0, 3/8, 3/8, 5/8; the middle asks for 32/3 of it."""
    named, short = few_tokens(_layers(9, [0, 3, 3, 5]))
    assert named.startswith("4 of 5 maps and experts")
    assert "layer 3 expert 0 (0 of 8), layer 3 expert 1 (3 of 8)" in named
    assert "the result may be worse than the merge: give at least 11 times as much" in short
    assert "give far more" in few_tokens(_layers(9, [0, 0, 0]))[-1]
    (short,) = few_tokens(_layers(31, [31, 31]))  # every map is determined, barely
    assert "give at least 2 times as much" in short
