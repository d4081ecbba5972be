"""Repairs on a GPU that are killed and resumed end with the bytes of an undisturbed run.

`KILLED_ON=cpu pytest tests/robustness/test_killed_gpu.py` runs them without a GPU.
"""

import json
import os
import signal

import pytest
import torch

import processes
from repairs.calibration import cases

DEVICE = os.environ.get("KILLED_ON", "cuda")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# The process kills itself when `place` is called for the fourth time.
CODE = """
import json, os, signal, sys
import moemerge
job = json.loads(sys.argv[1])
if job["killed"]:
    from moemerge.repairs.distill import Trainer
    from moemerge.repairs.layer import Layer
    place = {"distill": (Trainer, "step"), "refit": (Layer, "save")}[job["name"]]
    whole, calls = getattr(*place), []
    def dying(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *arguments)
    setattr(*place, dying)
report = getattr(moemerge, job["name"])(*job["words"], device=job["device"], **job["options"])
print(report.resumed)
"""
FAST = {"holdout": 0.2, "measure": False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("refit", {}),
        ("refit", {"solver": "gradient", "steps": 8}),
        ("distill", {"steps": 8, "learning_rate": 1e-3, "batch": 8}),
        ("distill", {"steps": 8, "learning_rate": 1e-3, "batch": 8, "lora": 4}),
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes(name, own, dtype, zoo_folder, tmp_path):
    case = cases.make_case(
        zoo_folder("olmoe", num_hidden_layers=4, dtype=dtype), tmp_path, rows=30, scale=0.3
    )
    given = {
        kind: {n: str(p) for n, p in getattr(case, kind).items()} for kind in ("sources", "data")
    }

    def start(out, *, killed=False):
        job = {
            "name": name,
            "words": [str(case.merged), str(tmp_path / out)],
            "device": DEVICE,
            "options": {**given, **FAST, **own},
            "killed": killed,
        }
        return processes.start(CODE, json.dumps(job))

    runs = start("whole"), start("resumed", killed=True)
    for run, code in zip(runs, (0, -signal.SIGKILL), strict=True):
        _, errors = run.communicate(timeout=processes.LIMIT)
        assert run.returncode == code, errors
    assert not (tmp_path / "resumed").exists()
    assert cases.leftovers(tmp_path / "resumed")

    run = start("resumed")
    printed, errors = run.communicate(timeout=processes.LIMIT)
    assert run.returncode == 0, errors
    if name == "refit":
        assert int(printed) >= 2
    assert cases.changed_tensors(case.merged, tmp_path / "whole")
    assert cases.weights(tmp_path / "resumed") == cases.weights(tmp_path / "whole")
    assert cases.leftovers(tmp_path / "resumed") == []
