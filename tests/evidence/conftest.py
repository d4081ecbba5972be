"""A small set of models that was hardly trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evidence import training
from moemerge.testbed import TrainedSet

SETTINGS: dict[str, Any] = {"preset": "tiny", "steps_scale": 0.002}  # five steps, and one


@pytest.fixture(autouse=True)
def _few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TEST_PROBLEMS", 4)


@pytest.fixture(scope="module")
def train_set() -> Callable[..., TrainedSet]:
    def train(out: Path, progress: Any = None, **settings: Any) -> TrainedSet:
        job = training.Job(out, **{**SETTINGS, **settings})
        return training.train([job], device="cpu", progress=progress)[0]

    return train


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, train_set: Callable[..., TrainedSet]
) -> TrainedSet:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "TEST_PROBLEMS", 4)
        return train_set(tmp_path_factory.mktemp("sets") / "olmoe-tiny-soft-0")
