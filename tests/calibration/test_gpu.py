"""The same calibration on a GPU: same routers, whatever is parked where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from calibration import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CaseOf = Callable[..., cases.Case]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cpu": {"offload": "cpu"},
    "disk": {"offload": "disk"},
    "sources": {"targets": "source-features", "holdout": 0.2},
    "exact": {"objective": "exact"},
    "kronecker": {"preconditioner": "kronecker"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss", "jetmoe"])
def test_the_device_does_not_matter(
    family: str, settings: dict[str, Any], case_of: CaseOf, tmp_path: Path
) -> None:
    case = case_of(family)
    near, tight = (2e-2, {}) if "objective" in settings else (1e-4, {"rtol": 1e-9})
    cpu = case.calibrate(tmp_path / "cpu", device="cpu", **settings, **tight)
    gpu = case.calibrate(tmp_path / "gpu", device="cuda", **settings, **tight)
    before, one, two = (zoo.tensors(p) for p in (case.merged, tmp_path / "cpu", tmp_path / "gpu"))
    assert cases.changed_tensors(case.merged, tmp_path / "gpu")
    for a, b in zip(cpu.layers, gpu.layers, strict=True):
        assert b["status"] == "converged"
        for name in case.sources:
            assert b["kl_after"][name] == pytest.approx(a["kl_after"][name], rel=2e-2)
        move = (one[a["router"]] - before[a["router"]]).norm()
        assert (one[a["router"]] - two[a["router"]]).norm() <= near * move


def test_a_bfloat16_checkpoint_runs_in_bfloat16(case_of: CaseOf, tmp_path: Path) -> None:
    case = case_of("olmoe", dtype=torch.bfloat16)
    report = case.calibrate(tmp_path / "out", device="cuda")
    assert report.dtype == "bfloat16"
    for row in report.layers:
        assert row["status"] == "converged"
        assert sum(row["kl_after"].values()) < sum(row["kl_before"].values())
