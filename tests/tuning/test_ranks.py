"""Two processes train together (gloo)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zoo
from moemerge.errors import UsageError
from together import job, together
from tuning.cases import rows, tune


@pytest.mark.slow
def test_two_processes_train_as_one_does(base: Path, tmp_path: Path) -> None:
    """The mean over all answers of a step, whichever process has them; rank 0 writes alone."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    how = {"batch": 32, "micro_batch": 16, "steps": 3, "learning_rate": 1e-3, "device": "cpu"}
    two = job("tune", base, tmp_path / "two", data=[str(file)], report=tmp_path / "report", **how)
    (code, words), (other, others) = together({2: [two]})
    assert (code, other) == (0, 0), words + others
    report = json.loads((tmp_path / "report.0").read_text())
    one = tune(base, tmp_path / "one", **how)
    losses = [point["loss"] for point in report["curve"]]
    assert losses == pytest.approx([point.loss for point in one.curve], rel=1e-3)
    assert report["processes"] == 2
    a, b, before = (zoo.tensors(tmp_path / name) for name in ("one", "two", "base"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (a[name] - b[name]).norm() < 0.05 * (a[name] - before[name]).norm()
    assert not list(tmp_path.glob(".*"))


def test_rows_that_cannot_be_shared_alike_are_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="3 processes cannot share evenly"):
        tune(base, tmp_path / "out")
