"""Labels are cut to what tells them apart."""

from __future__ import annotations

import pytest

from moemerge.report.words import display_names


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
def test_display_names(labels: list[str], names: list[str]) -> None:
    assert display_names(labels) == names
