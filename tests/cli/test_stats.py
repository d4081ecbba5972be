"""`moemerge stats` as a user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import zoo
from moemerge.cli.app import app
from moemerge.statistics import Statistics


def stats(*args: str | Path) -> Result:
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["stats", *map(str, args)], env=environment)


@pytest.fixture
def case(zoo_folder: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A model folder and its text."""
    folder = zoo.perturb(zoo_folder("olmoe"), tmp_path / "model", seed=1)
    zoo.tiny_tokenizer(folder)
    text = tmp_path / "text.jsonl"
    rows = ("one plus two is three", "def sum of list return value", "what is a model")
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder, text


def test_the_file_and_what_is_told(case: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = case
    out, report = tmp_path / "a.stats", tmp_path / "report.json"
    result = stats(folder, out, "--data", text, "--device", "cpu", "--json", report)
    assert result.exit_code == 0, result.output
    assert "gram statistics of" in result.stdout
    assert "3 sequences" in result.stdout
    found = json.loads(report.read_text())
    assert found["provenance"]["model"] == str(folder)
    assert found["nbytes"] == out.stat().st_size
    with Statistics.open(out) as written:
        assert written.kind == "gram"
        assert len(written.units) == found["units"]
        assert written.provenance.tokens == found["provenance"]["tokens"]


def test_kinds_and_settings(case: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = case
    out = tmp_path / "a.stats"
    flags = ("--kind", "fisher", "--limit", "2", "--seed", "5", "--max-length", "4", "--json", "-")
    result = stats(folder, out, "--data", text, "--data", text, "--device", "cpu", *flags)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["kind"] == "fisher"
    assert found["provenance"]["seed"] == 5
    assert found["provenance"]["sequences"] == 2
    assert found["provenance"]["tokens"] <= 8
    assert found["unvisited_experts"]
    shown = stats(folder, out, "--data", text, "--limit", "1", "--device", "cpu", "--overwrite")
    assert "no token came to" in shown.stdout
    assert "-v names them" in shown.stdout


def test_what_is_not_read_of_the_text_is_told(case: tuple[Path, Path], tmp_path: Path) -> None:
    folder, text = case
    rows = [{"prompt": "one plus two", "respnse": "three"}, {"prompt": "what is a model"}]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--data", text, "--device", "cpu", "--max-length", "3")
    result = stats(folder, tmp_path / "a.stats", *flags)
    assert "respnse" in result.stderr
    assert "2 of 2 rows longer than --max-length, 3 tokens" in result.stderr
    quiet = stats(folder, tmp_path / "b.stats", *flags, "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert (tmp_path / "a.stats").read_bytes() == (tmp_path / "b.stats").read_bytes()
