"""Counts as people write them."""

from __future__ import annotations

from moemerge.runtime.progress import counted


def test_one_is_no_plural() -> None:
    assert counted(1, "row") == "1 row"
    assert [counted(n, "row") for n in (0, 2, 12345)] == ["0 rows", "2 rows", "12,345 rows"]
    assert counted(1, "row holds", "rows hold") == "1 row holds"
    assert counted(2, "row holds", "rows hold") == "2 rows hold"
