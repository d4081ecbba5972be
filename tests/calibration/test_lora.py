"""A LoRA of routers and experts on another fine-tune: diagnosed, calibrated and refitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import moemerge
import zoo

RANK = 2


def adapter_of(folder: Path, model: Path) -> Path:
    """A LoRA of every router and of the experts' last projections."""
    generator = torch.Generator().manual_seed(5)
    factors = {}
    for name, tensor in zoo.tensors(model).items():
        if name.endswith(("mlp.gate.weight", "down_proj.weight")):
            out, into = tensor.shape
            root = name.removesuffix(".weight")
            factors[f"{root}.lora_A.weight"] = torch.randn(RANK, into, generator=generator)
            factors[f"{root}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * 0.02
    return zoo.adapter(folder, factors, lora_alpha=RANK)


def test_a_lora_on_another_fine_tune(case_of: Any, tmp_path: Path) -> None:
    """The sources are the fine-tune, and the model that the LoRA was trained on, with it."""
    case = case_of("olmoe")
    base, math = case.merged, case.sources["math"]
    lora = adapter_of(tmp_path / "lora", base)
    zoo.tiny_tokenizer(lora)
    model = f"{math}+{lora}"
    options: dict[str, Any] = {
        "sources": {"math": math, "code": f"{base}+{lora}"},
        "data": {name: case.data[name] for name in ("math", "code")},
        "device": "cpu",
    }
    diagnosis = moemerge.diagnose(model, **options)
    assert all(diagnosis.total(name).mismatch > 0 for name in options["sources"])
    report = moemerge.calibrate(model, tmp_path / "calibrated", holdout=0.0, **options)
    totals = report.totals
    assert sum(totals["kl_after"].values()) < sum(totals["kl_before"].values())
    refitted = moemerge.refit(model, tmp_path / "refitted", holdout=0.0, ridge=0.01, **options)
    last = refitted.layers[-2]
    assert sum(last["drift_after"].values()) < sum(last["drift_before"].values())
    zoo.assert_loads(tmp_path / "calibrated")
    zoo.assert_loads(tmp_path / "refitted")
