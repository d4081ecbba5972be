"""The same refit on a GPU: same maps; and sums of bfloat16 values that are good enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from calibration import cases as calibrating
from refitting.cases import make_case
from refitting.test_maths import SMALL, assert_sums_of_bfloat16_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CaseOf = Callable[..., Any]


@pytest.mark.parametrize("offload", ["device", "cpu"])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_the_device_does_not_matter(
    family: str, offload: str, zoo_folder: CaseOf, tmp_path: Path
) -> None:
    case = make_case(zoo_folder(family), tmp_path / "case")
    settings: dict[str, Any] = {"ridge": 0.01, "holdout": 0.2, "router": "keep"}
    case.refit(tmp_path / "cpu", device="cpu", **settings)
    case.refit(tmp_path / "gpu", device="cuda", offload=offload, **settings)
    before, one, two = (zoo.tensors(p) for p in (case.merged, tmp_path / "cpu", tmp_path / "gpu"))
    assert calibrating.changed_tensors(case.merged, tmp_path / "gpu")
    for name, tensor in one.items():
        move = (tensor.double() - before[name].double()).norm()
        assert (tensor.double() - two[name].double()).norm() <= 2e-2 * move + 1e-6, name


def test_a_bfloat16_checkpoint_gains(zoo_folder: CaseOf, tmp_path: Path) -> None:
    base = zoo_folder("olmoe", dtype=torch.bfloat16)
    case = make_case(base, tmp_path / "case", rows=60, scale=0.1)
    report = case.refit(tmp_path / "out", device="cuda")
    assert report.dtype == "bfloat16"
    last = report.layers[-2]
    for name, drift in last["drift_after"].items():
        assert drift < last["drift_before"][name]
    again = case.refit(tmp_path / "again", device="cuda")
    assert calibrating.weights(tmp_path / "out") == calibrating.weights(tmp_path / "again")
    assert [layer["maps"] for layer in again.layers] == [layer["maps"] for layer in report.layers]


@pytest.mark.parametrize("ridge", SMALL)
@pytest.mark.parametrize("tokens", [5_000, 200_000])
def test_sums_of_bfloat16_values(tokens: int, ridge: float) -> None:
    within = {1e-5: 2e-3, 1e-3: 6e-4}[ridge]
    assert_sums_of_bfloat16_values(torch.device("cuda"), tokens, ridge, width=512, within=within)
