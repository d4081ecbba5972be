"""The demo tells the truth: routing breaks by merging and heals by calibration."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import zoo
from moemerge.testbed.agreement import compare_routing
from moemerge.testbed.tiny import make_specialists


@pytest.fixture(scope="module")
def specialists(tmp_path_factory):
    return make_specialists(tmp_path_factory.mktemp("specialists"))


def test_specialists_are_the_same_for_the_same_seed(specialists, tmp_path):
    again = make_specialists(tmp_path)
    first, second = zoo.tensors(specialists.models["math"]), zoo.tensors(again.models["math"])
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert specialists.data["code"].read_text() == again.data["code"].read_text()


def test_a_model_agrees_with_itself(specialists):
    math, text = specialists.models["math"], specialists.held_out["math"]
    same = compare_routing(math, math, text)
    assert (same.mismatch, same.any_mismatch, same.kl) == (0.0, 0.0, 0.0)
    other = compare_routing(specialists.models["code"], math, text)
    assert other.mismatch > 0.3
    assert other.kl > 0.1


@pytest.mark.slow
def test_calibration_heals_what_merging_broke(tmp_path):
    folder = tmp_path / "demo"
    result = subprocess.run(
        [sys.executable, "-m", "moemerge", "demo", str(folder), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    for method in ("TIES", "WUDI"):
        by = {r["routers"]: r["agreement"] for r in rows if r["method"] == method}
        for domain in ("math", "code"):
            merged, averaged, harc, source = (
                by[name][domain]["mismatch"]
                for name in ("as merged", "averaged", "HARC", "HARC, source targets")
            )
            assert source < harc < averaged < merged
    again = subprocess.run(
        [sys.executable, "-m", "moemerge", "demo", str(tmp_path)], capture_output=True, text=True
    )
    assert again.returncode == 2
    assert "is no demo" in again.stderr
