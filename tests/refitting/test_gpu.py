"""The same refit on a GPU: same maps; and sums of bfloat16 values that are good enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from calibration import cases as calibrating
from moemerge.refitting.ridge import Factor
from moemerge.refitting.sums import FitSums
from refitting.cases import make_case

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


@pytest.mark.parametrize("ridge", [1e-5, 1e-3])
@pytest.mark.parametrize("tokens", [5_000, 200_000])
def test_sums_of_bfloat16_values(tokens: int, ridge: float) -> None:
    """Inputs with a mean, a steep spectrum and two huge channels; the map's move is what counts."""
    device, width, outputs = torch.device("cuda"), 512, 256
    rng = torch.Generator(device).manual_seed(0)
    scales = torch.logspace(0, -2, width, device=device)
    x = torch.randn(tokens, width, generator=rng, device=device) * scales + 0.5 * scales
    x = x @ torch.linalg.qr(torch.randn(width, width, generator=rng, device=device))[0]
    x[:, :2] += 30.0
    x = x.bfloat16()
    true = torch.randn(outputs, width, generator=rng, device=device)
    r = x.float() @ true.T + 3.0 * torch.randn(tokens, outputs, generator=rng, device=device)
    s = torch.rand(tokens, 1, generator=rng, device=device)
    sums = FitSums.empty(outputs, width, device)
    for at in range(0, tokens, 65_536):
        sums.add(x[at : at + 65_536], r[at : at + 65_536], s[at : at + 65_536])
    wide, lacking = s.double() * x.double(), s.double() * r.double()
    gram, cross = wide.T @ wide, lacking.T @ wide
    assert float((sums.gram - gram).norm() / gram.norm()) < 1e-4
    mine, dense = Factor(sums.gram, ridge).update(sums.cross), Factor(gram, ridge).update(cross)
    assert float((mine - dense).norm() / dense.norm()) < 2e-2
    # What the difference costs in the fit itself.
    exact = FitSums(gram, cross, lacking.square().sum(), tokens)
    assert exact.error(mine) <= exact.error(dense) * (1 + 1e-4)
