"""`moemerge evaluate`: table, notes, words for what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evaluation.cases import write_task
from moemerge.cli.app import app
from moemerge.testbed import bundled_set
from moemerge.testbed.tasks import problems

GREEDY = ["--samples", "1", "--temperature", "0", "--device", "cpu", "--draws", "300"]


@pytest.fixture(scope="module")
def models() -> list[str]:
    return [str(bundled_set().models[name]) for name in ("math", "chat")]


@pytest.fixture
def task(tmp_path: Path) -> str:
    return write_task(tmp_path, problems("math", split="test", count=20, seed=3))


def run(*words: str):
    return CliRunner().invoke(app, ["evaluate", *words])


def test_scores_pairs_and_what_is_to_do(models, task, tmp_path):
    out, report = tmp_path / "out", tmp_path / "report.json"
    result = run(*models, "--task", task, "--out", str(out), "--json", str(report), *GREEDY)
    assert result.exit_code == 0, result.output
    assert "math: 20 completions to make" in result.output
    assert "at most 480 tokens to generate" in result.output
    assert "chat − math" in result.output
    told = json.loads(report.read_text())
    score = told["results"][0]["scores"]["math"]
    assert f"{100 * score['mean']:.1f} ± {100 * score['error']:.1f}" in result.output
    del told["moemerge"]
    assert told == json.loads((out / "results.json").read_text())["evaluation"]
    again = run("--rescore", "--task", task, "--out", str(out), *GREEDY)
    assert again.exit_code == 0, again.output
    assert "math − chat" in again.output


def test_draws_are_bounded(models, task, tmp_path):
    result = run(*models, "--out", str(tmp_path / "out"), "--task", task, "--draws", "100000000000")
    assert result.exit_code == 2
    assert "--draws" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--task", "gsm8"], 2, "unknown task 'gsm8', did you mean 'gsm8k'?"),
        ([], 2, "no task is given"),
        (["--task", "gsm8k", "--data", "gsm8k=nowhere.jsonl"], 3, "no such file nowhere.jsonl"),
        (["--task", "TASK", "--protocol", "papers"], 2, "--protocol"),
        (["--task", "TASK", "--engine", "server", "--url", "http://x/v1"], 2, "a server runs one"),
        (["--task", "TASK", "--rescore"], 3, "20 answers to sums missing in"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_left(models, task, tmp_path, words, code, message):
    before = sorted(path.name for path in tmp_path.iterdir())
    words = [task if word == "TASK" else word for word in words]
    result = run(*models, "--out", str(tmp_path / "out"), *words, *GREEDY)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == before
