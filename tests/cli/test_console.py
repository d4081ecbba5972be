"""What a long job shows where no bar can be drawn."""

from __future__ import annotations

import pytest

from moemerge.cli import console


def run(*amounts: int, total: int, unit: str, quiet: bool = False) -> None:
    with console.progress(quiet=quiet) as bar:
        bar.start("reading", total, unit=unit)
        for amount in amounts:
            bar.advance(amount)


def test_a_log_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    run(0, 3, 1, total=8, unit="steps")
    run(1_500_000, total=3_000_000, unit="B")
    assert capsys.readouterr().err.splitlines() == [
        "reading: 3 of 8 steps, 0:00:00 left",
        "reading: 4 of 8 steps, 0:00:00 left",
        "reading: 1.5 MB of 3.0 MB, 0:00:00 left",
    ]


def test_a_short_job_leaves_none(capsys: pytest.CaptureFixture[str]) -> None:
    run(3, 1, total=8, unit="steps")
    assert capsys.readouterr().err == ""


def test_quiet_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    run(3, total=8, unit="steps", quiet=True)
    assert capsys.readouterr().err == ""
