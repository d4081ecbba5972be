"""A distillation by two processes (torchrun, gloo) gives what one process gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moemerge
import zoo
from calibration import cases
from together import LIMIT, job, together

pytestmark = [pytest.mark.timeout(LIMIT), pytest.mark.slow]

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "steps": 4,
    "learning_rate": 1e-3,
    "holdout": 0.3,
    "measure": False,
}
# Adam divides by the size of a gradient, which magnifies rounding errors of small ones.
LARGEST_DIFFERENCE = 0.02


def test_two_processes_train_as_one(tmp_path: Path, zoo_folder: Callable[..., Path]) -> None:
    case = cases.make_case(zoo_folder("olmoe"), tmp_path, rows=12)
    given = {"sources": case.sources, "data": case.data, **SETTINGS}
    alone = moemerge.distill(case.merged, tmp_path / "alone", **given)
    report = tmp_path / "report.json"
    work = job("distill", case.merged, tmp_path / "both", report=report, **given)

    for code, words in together({2: [work]}):
        assert code == 0, words

    before, one, both = (zoo.tensors(tmp_path / n) for n in ("merged", "alone", "both"))
    moved = [name for name in before if not torch.equal(before[name], one[name])]
    differences = [(one[n] - both[n]).norm() / (one[n] - before[n]).norm() for n in moved]
    assert moved
    assert max(map(float, differences)) < LARGEST_DIFFERENCE
    for rank in (0, 1):
        losses = json.loads(Path(f"{report}.{rank}").read_text())["losses"]
        assert losses == pytest.approx(list(alone.losses), rel=1e-4)
    assert cases.leftovers(tmp_path / "both") == []
