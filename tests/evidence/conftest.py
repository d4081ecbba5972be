"""A small set of models that was hardly trained."""

import pytest

from evidence import training

SETTINGS = {"preset": "tiny", "steps_scale": 0.002}  # five steps, and one


@pytest.fixture(autouse=True)
def _few_problems(monkeypatch):
    monkeypatch.setattr(training, "TEST_PROBLEMS", 4)


@pytest.fixture(scope="module")
def train_set():
    def train(out, progress=None, **settings):
        job = training.Job(out, **{**SETTINGS, **settings})
        return training.train([job], device="cpu", progress=progress)[0]

    return train


@pytest.fixture(scope="module")
def trained(tmp_path_factory, train_set):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "TEST_PROBLEMS", 4)
        return train_set(tmp_path_factory.mktemp("sets") / "olmoe-tiny-soft-0")
