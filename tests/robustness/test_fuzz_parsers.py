"""A small share of `python -m tools.fuzz_parsers`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import fuzz_parsers


def test_parsers_accept_or_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = fuzz_parsers.targets(tmp_path)
    assert fuzz_parsers.campaign(chosen, 4000, seed=7, seconds=60) == 0, capsys.readouterr().out
    for name in ("rows", "safetensors header", "config.json", "adapter config"):
        assert {"refused", "accepted"} <= set(chosen[name].outcomes), name


def test_a_crash_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def parse(data: bytes) -> None:
        data.decode("ascii")

    broken = fuzz_parsers.Target(parse, [b'{"text": "one"}'], 1)
    assert fuzz_parsers.campaign({"broken": broken}, 500, seed=1, seconds=60) == 1
    assert "UnicodeDecodeError" in capsys.readouterr().out
