"""The same experts are kept on a GPU, and the same repair is made."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moemerge
import zoo
from calibration import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("repair", ["calibrate", "refit"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3"])
def test_the_device_does_not_matter(
    family: str, repair: str, zoo_folder: Callable[..., Path], tmp_path: Path
) -> None:
    base = shutil.copytree(zoo_folder(family), tmp_path / "base")
    zoo.tiny_tokenizer(base)
    options: dict[str, Any] = {
        "data": {"text": cases.write_text(tmp_path / "t.jsonl", seed=1, rows=40)},
        "repair": repair,
        "measure": False,
    }
    reports = {
        device: moemerge.prune(base, tmp_path / device, device=device, **options)
        for device in ("cpu", "cuda")
    }
    assert reports["cpu"].pruning.kept == reports["cuda"].pruning.kept
    one, two = zoo.tensors(tmp_path / "cpu"), zoo.tensors(tmp_path / "cuda")
    for name, tensor in one.items():
        gap = (tensor.double() - two[name].double()).norm()
        assert gap <= 2e-2 * tensor.double().norm() + 1e-6, name
