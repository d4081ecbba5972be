"""Several processes calibrate together (torchrun, gloo)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from calibration import cases
from moemerge.errors import DataError
from moemerge.text.batches import divided, make_batches
from moemerge.text.domains import Domain

# Tight, so that what is left is rounding and not where CG happened to stop.
EXACT = {"rtol": 1e-11, "device": "cpu", "dtype": "float64"}

# Calibrates every case; in rank 1 the job may end before the second router of the first.
SCRIPT = """
import json, os, sys
import moemerge
from moemerge.calibration.solve import RouterSolver

jobs, die = json.loads(sys.argv[1])
if die and os.environ["RANK"] == "1":
    visit, visits = RouterSolver.visit, []
    def ends(self, pair, stops):
        visits.append(pair)
        if len(visits) == 2:
            os._exit(9)
        return visit(self, pair, stops)
    RouterSolver.visit = ends
for job in jobs:
    try:
        moemerge.calibrate(job["merged"], job["out"], sources=job["sources"], data=job["data"],
                           **job["settings"])
    except moemerge.MoeMergeError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(error.exit_code)
"""


def together(
    ranks: int, jobs: list[dict[str, Any]], *, die: bool = False
) -> subprocess.CompletedProcess[str]:
    """The script in so many processes. torchrun would end the others itself; here they must."""
    port = str(20000 + os.getpid() % 20000 + ranks)
    common = {
        **os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    words = [sys.executable, "-c", SCRIPT, json.dumps([jobs, die])]
    processes = [
        subprocess.Popen(words, env={**common, "RANK": str(n)}, stderr=subprocess.PIPE, text=True)
        for n in range(ranks)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    return subprocess.CompletedProcess(words, processes[0].returncode, "", errors[0])


def job_of(case: cases.Case, out: Path, **settings: Any) -> dict[str, Any]:
    return {
        "merged": str(case.merged),
        "out": str(out),
        "sources": {name: str(path) for name, path in case.sources.items()},
        "data": {name: str(path) for name, path in case.data.items()},
        "settings": {**EXACT, **settings},
    }


def off(one: Path, other: Path, merged: Path) -> float:
    """How far two calibrations are apart, as a share of a router's move; the largest."""
    before, a, b = (load_file(next(p.glob("*.safetensors"))) for p in (merged, one, other))
    moved = [name for name in before if not torch.equal(before[name], a[name])]
    assert moved
    shares = [(a[n] - b[n]).norm() / (a[n] - before[n]).norm() for n in moved]
    assert all(torch.equal(b[name], before[name]) for name in before if name not in moved)
    return max(map(float, shares))


def figures(out: Path) -> list[dict[str, Any]]:
    rows = json.loads((out / "moemerge_report.json").read_text())["calibration"]["layers"]
    names = ("tokens", "mismatch_before", "mismatch_after", "top1_before", "top1_after")
    return [{name: row[name] for name in names} for row in rows]


# Newton's method ends when a step promises little, which depends on the steps before it.
JOBS: list[tuple[str, dict[str, Any], float]] = [
    ("olmoe", {}, 1e-5),
    ("qwen3_moe", {"targets": "source-features", "holdout": 0.4, "measure": True}, 1e-5),
    ("deepseek_v3", {"targets": "source-features"}, 1e-5),
    ("olmoe", {"objective": "exact"}, 1e-3),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_give_what_one_gives(
    ranks: int, zoo_folder: Callable[..., Path], tmp_path: Path
) -> None:
    jobs = []
    for at, (family, settings, _) in enumerate(JOBS):
        folder = tmp_path / str(at)
        folder.mkdir()
        case = cases.make_case(zoo_folder(family), folder, rows=8)
        case.calibrate(folder / "alone", **EXACT, **settings)
        jobs.append(job_of(case, folder / "together", **settings))
    done = together(ranks, jobs)
    assert done.returncode == 0, done.stderr
    for at, (family, _, close) in enumerate(JOBS):
        folder = tmp_path / str(at)
        alone, several = folder / "alone", folder / "together"
        assert off(alone, several, folder / "merged") < close, family
        assert figures(alone) == figures(several)


def test_a_process_that_dies_ends_the_others_and_one_resumes(
    zoo_folder: Callable[..., Path], tmp_path: Path
) -> None:
    case = cases.make_case(zoo_folder("olmoe"), tmp_path, rows=8)
    done = together(2, [job_of(case, tmp_path / "out")], die=True)
    assert done.returncode != 0
    assert "rank 0 of 2: another rank ended or could not be reached" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    report = case.calibrate(tmp_path / "out", resume=True, **EXACT)
    assert report.resumed == 1
    case.calibrate(tmp_path / "alone", **EXACT)
    assert off(tmp_path / "alone", tmp_path / "out", case.merged) < 1e-5


def test_batches_are_halved_until_there_is_one_for_each() -> None:
    rows = tuple(torch.arange(n, n + 5) for n in range(7))
    domain = Domain("math", rows, rows[:4])
    groups = divided(make_batches([domain]), 3)
    assert [len(group) for group in groups] == [3, 3]
    assert sorted(place for batch in groups[0] for place in batch.places) == list(range(7))
    for batch in groups[0]:
        for place, ids in zip(batch.places, batch.input_ids, strict=True):
            assert torch.equal(ids, rows[place])
    with pytest.raises(DataError, match="'math' has 4 rows held out for 5 processes"):
        divided(make_batches([domain]), 5)
