"""A distillation by two processes (torchrun, gloo, FSDP) gives what one process gives."""

import json

import pytest
import torch

import moemerge
import zoo
from repairs.calibration import cases
from together import LIMIT, job, together

pytestmark = [pytest.mark.timeout(LIMIT), pytest.mark.slow]

SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "steps": 4,
    "learning_rate": 1e-3,
    "holdout": 0.3,
    "measure": False,
}
# Adam divides by the size of a gradient, which magnifies rounding errors of small ones.
LARGEST_DIFFERENCE = 0.02


RUNS = {"whole": {}, "lora": {"lora": 4, "learning_rate": 1e-2}}


def test_two_processes_train_as_one(tmp_path, zoo_folder):
    """Each process holds half of the weights. With 13 rows the processes have unequal shares."""
    case = cases.make_case(zoo_folder("olmoe"), tmp_path, rows=13)
    given = {"sources": case.sources, "data": case.data, **SETTINGS}
    jobs = [
        job(
            "distill",
            case.merged,
            tmp_path / f"{name}-both",
            report=tmp_path / f"{name}.json",
            **{**given, **own},
        )
        for name, own in RUNS.items()
    ]
    alone = {
        name: moemerge.distill(case.merged, tmp_path / name, **{**given, **own})
        for name, own in RUNS.items()
    }

    for code, words in together({2: jobs}):
        assert code == 0, words

    for name in RUNS:
        folders = (case.merged, tmp_path / name, tmp_path / f"{name}-both")
        before, one, both = map(zoo.tensors, folders)
        moved = [own for own in before if not torch.equal(before[own], one[own])]
        differences = [(one[n] - both[n]).norm() / (one[n] - before[n]).norm() for n in moved]
        assert moved
        assert max(map(float, differences)) < LARGEST_DIFFERENCE
        for rank in (0, 1):
            losses = json.loads((tmp_path / f"{name}.json.{rank}").read_text())["losses"]
            assert losses == pytest.approx(list(alone[name].losses), rel=1e-4)
        assert cases.leftovers(tmp_path / f"{name}-both") == []
