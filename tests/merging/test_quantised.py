"""Quantised inputs merge as their dequantised copies do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import moemerge
import quantised_zoo as qz
import zoo

Folder = Callable[..., Path]


@pytest.fixture(scope="session")
def published(zoo_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`published(kind)`: a base and two fine-tunes, plain and as they are published; read only."""
    made: dict[str, list[tuple[Path, Path]]] = {}

    def models(name: str) -> list[tuple[Path, Path]]:
        if name not in made:
            kind, folder = qz.KINDS[name], tmp_path_factory.mktemp("published")
            base = zoo_folder(kind.family, dtype=torch.bfloat16, **kind.sizes)
            plain = [base, *(zoo.perturb(base, folder / f"m{i}", i) for i in (1, 2))]
            made[name] = [
                (one, kind.publish(one, folder / f"q{i}", shards=1 + i))
                for i, one in enumerate(plain)
            ]
        return made[name]

    return models


def linear(*models: Path, **extra: Any) -> dict[str, Any]:
    entries = [{"model": str(m), "parameters": {"weight": 1.0 + i}} for i, m in enumerate(models)]
    return {"merge_method": "linear", "models": entries, **extra}


def ties(base: Path, *models: Path) -> dict[str, Any]:
    return {**linear(*models), "merge_method": "ties", "base_model": str(base)}


@pytest.mark.parametrize("kind", qz.KINDS)
def test_merges_as_the_dequantised_copies_do(
    published: Callable[..., Any], tmp_path: Path, kind: str
) -> None:
    folders = [quantised for _, quantised in published(kind)]
    plain = [qz.plain_copy(f, tmp_path / f"plain{i}") for i, f in enumerate(folders)]
    for config, name in ((linear, "linear"), (ties, "ties")):
        moemerge.merge(config(*folders), tmp_path / name)
        moemerge.merge(config(*plain), tmp_path / f"{name}-plain")
        ours, theirs = zoo.tensors(tmp_path / name), zoo.tensors(tmp_path / f"{name}-plain")
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert zoo.read_config(tmp_path / name) == zoo.read_config(tmp_path / f"{name}-plain")
    assert "quantization_config" not in zoo.read_config(tmp_path / "ties")
    with zoo._quiet():
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ties")


def test_quantised_and_plain_models_mix(published: Callable[..., Any], tmp_path: Path) -> None:
    (base, fp8_base), (math, fp8_math), (code, _) = published("qwen fp8")
    copies = {
        f: qz.plain_copy(f, tmp_path / f"plain{i}") for i, f in enumerate((fp8_base, fp8_math))
    }
    for i, mixed in enumerate(((fp8_base, math, code), (base, fp8_math, code))):
        moemerge.merge(ties(*mixed), tmp_path / f"mixed{i}")
        moemerge.merge(ties(*(copies.get(f, f) for f in mixed)), tmp_path / f"same{i}")
        ours, theirs = (zoo.tensors(tmp_path / f"{n}{i}") for n in ("mixed", "same"))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_every_input_tensor_is_accounted_for(published: Callable[..., Any], tmp_path: Path) -> None:
    folders = [quantised for _, quantised in published("kimi int4")]
    moemerge.merge(linear(*folders), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "moemerge_report.json").read_text())["merge"]
    merged = load_file(tmp_path / "out" / "model.safetensors")
    for account in report["inputs"].values():
        assert account["merged"] == account["tensors"] == len(merged)
