"""A quantised model is calibrated as its dequantised copy is; only its routers change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import quantised_zoo as qz
import zoo
from calibration import cases
from moemerge.errors import CheckpointError


@pytest.mark.parametrize("kind", ["deepseek fp8", "gpt-oss mxfp4", "kimi int4", "llama4 fp8 a row"])
def test_only_the_routers_change(case_of: Any, tmp_path: Path, kind: str) -> None:
    form = qz.KINDS[kind]
    case = case_of(form.family, dtype=torch.bfloat16, **form.sizes)
    merged = form.publish(case.merged, tmp_path / "quantised", shards=2)
    plain = qz.plain_copy(merged, tmp_path / "plain")
    sources = {"math": form.publish(case.sources["math"], tmp_path / "math")}
    sources = {**case.sources, **sources}
    for folder, out in ((merged, "out"), (plain, "out-plain")):
        cases.Case(folder, sources, case.data).calibrate(
            tmp_path / out, targets="source-features", objective="exact"
        )
    before, after = zoo.tensors(merged), zoo.tensors(tmp_path / "out")
    changed = {name for name in before if not equal(before[name], after[name])}
    assert changed
    assert all(
        name.endswith((".gate.weight", ".router.weight", ".router.bias")) for name in changed
    )
    expected = zoo.tensors(tmp_path / "out-plain")
    assert all(torch.equal(after[name], expected[name]) for name in changed)
    assert zoo.read_config(tmp_path / "out") == zoo.read_config(merged)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_routers_that_are_quantised_themselves(case_of: Any, tmp_path: Path) -> None:
    case = case_of("olmoe", dtype=torch.bfloat16)
    merged = qz.convert(
        case.merged,
        tmp_path / "quantised",
        qz.fp8_config(8, 8),
        qz.block_fp8(8, 8),
        lambda name, tensor: name.endswith("gate.weight"),
    )
    broken = cases.Case(merged, case.sources, case.data)
    with pytest.raises(CheckpointError, match="stored as float8_e4m3fn in 8 x 8 blocks"):
        broken.calibrate(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(merged)


def test_the_original_as_the_only_source(case_of: Any, tmp_path: Path) -> None:
    """Its router is the quantised model's own: only its routing on its own features repairs."""
    case = case_of("olmoe", dtype=torch.bfloat16)
    original = case.merged
    quantised = qz.KINDS["fp8 a tensor"].publish(original, tmp_path / "quantised")
    one = cases.Case(quantised, {"math": original}, {"math": case.data["math"]})
    report = one.calibrate(tmp_path / "out", holdout=0.0)
    assert report.settings["targets"] == "source-features"
    assert any("all sources have the same routers" in notice for notice in report.notices)
    assert "targets: source-features" in (tmp_path / "out" / "moemerge_config.yml").read_text()
    totals = report.totals
    assert totals["kl_after"]["math"] < totals["kl_before"]["math"]
    kept = one.calibrate(tmp_path / "kept", holdout=0.0, targets="merged-features")
    assert any("would repair their routing" in notice for notice in kept.notices)
    before, after = zoo.tensors(quantised), zoo.tensors(tmp_path / "kept")
    assert all(equal(before[name], after[name]) for name in before)
