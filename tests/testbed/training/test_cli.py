"""`moemerge testbed train` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from moemerge.cli.app import app
from moemerge.testbed.training import run as running
from moemerge.testbed.training import stacks

FLAGS = ["--preset", "tiny", "--regime", "plain", "--steps-scale", "0.0008", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _few_problems(monkeypatch):
    monkeypatch.setattr(running, "TEST_PROBLEMS", 4)


def moemerge(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["testbed", "train", *map(str, args)])


def test_a_table_on_stdout_and_the_manifest_as_json(tmp_path):
    file = tmp_path / "told.json"
    result = moemerge(*FLAGS, "--domain", "chat", "--json", file, tmp_path / "set")
    assert result.exit_code == 0, result.output
    assert "chat %" in result.stdout
    assert "steps/s" in result.stderr
    told = json.loads(file.read_text())
    assert told == json.loads((tmp_path / "set" / "testbed.json").read_text())
    assert told["arch"] == "olmoe"
    again = moemerge(*FLAGS, tmp_path / "set")
    assert again.exit_code == 3
    assert "exists" in again.stderr


def test_wrong_words_are_usage_errors(tmp_path):
    result = moemerge("--preset", "tiny", "--regime", "sotf", tmp_path / "set")
    assert result.exit_code == 2
    assert "did you mean 'soft'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_training_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "SAVE_SECONDS", 0.0)
    real = stacks.train_stack

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(stacks, "train_stack", interrupted)
    result = moemerge(*FLAGS, "--domain", "chat", tmp_path / "set")
    assert result.exit_code == 130
    assert "--resume" in result.stderr
    monkeypatch.setattr(stacks, "train_stack", real)
    result = moemerge(*FLAGS, "--domain", "chat", "--resume", tmp_path / "set")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "set" / "chat" / "model.safetensors").exists()
