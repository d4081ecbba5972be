"""`moemerge data`: flags, summary, words for what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moemerge.cli.app import app
from moemerge.testbed import bundled_set
from moemerge.testbed.tasks import problems


@pytest.fixture(scope="module")
def model() -> str:
    return str(bundled_set().models["math"])


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"q": p.prompt, "final": p.answer} for p in problems("math", split="test", count=20, seed=3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(*words: str):
    return CliRunner().invoke(app, ["data", *words])


def test_answers_are_kept_and_told_of(model, prompts, tmp_path):
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    result = run(
        model, str(out), "--prompts", prompts, "--map", "prompt=q,answer=final", "--verify",
        "exact", "--max-new-tokens", "24", "--device", "cpu", "--json", str(report),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(report.read_text())
    assert told["kept"] == len(out.read_text().splitlines()) > 0
    assert f"kept     {told['kept']} rows" in result.output
    assert "20 asked for, 20 ended" in result.output
    assert f"{told['answers']['grades']['right']} right" in result.output
