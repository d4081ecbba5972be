"""Quantised models are diagnosed and collected from as their dequantised copies are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import moemerge
import quantised_zoo as qz
import zoo


def test_diagnosis_and_statistics(case_of: Any, tmp_path: Path) -> None:
    kind = qz.KINDS["qwen fp8"]
    case = case_of(kind.family, dtype=torch.bfloat16)
    merged = kind.publish(case.merged, tmp_path / "quantised", shards=2)
    plain = qz.plain_copy(merged, tmp_path / "plain")
    rows = [
        moemerge.diagnose(folder, sources=case.sources, data=case.data).rows()
        for folder in (merged, plain)
    ]
    assert figures(rows[0]) == figures(rows[1])
    files = []
    for folder in (merged, plain):
        files.append(tmp_path / f"{folder.name}.stats")
        moemerge.collect_statistics(folder, files[-1], data=case.data["math"])
    ours, theirs = (load_file(file) for file in files)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "model"} for row in rows]


def test_routers_are_swapped_and_all_else_is_copied(case_of: Any, tmp_path: Path) -> None:
    kind = qz.KINDS["qwen fp8"]
    case = case_of(kind.family, dtype=torch.bfloat16)
    merged = kind.publish(case.merged, tmp_path / "quantised", shards=2)
    report = moemerge.swap_routers(merged, case.sources["math"], tmp_path / "out")
    before, after = zoo.tensors(merged), zoo.tensors(tmp_path / "out")
    routers = zoo.tensors(case.sources["math"])
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        wanted = routers[name] if name in report.tensors else before[name]
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)), name
    assert zoo.read_config(tmp_path / "out") == zoo.read_config(merged)
