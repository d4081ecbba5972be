"""The same figures on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import moemerge
from calibration import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
CaseOf = Callable[..., cases.Case]
NEAR = ("kl", "kl_on_features", "quadratic", "weighted_overlap", "drift", "logit_shift")


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_a_gpu_finds_what_a_cpu_finds(family: str, case_of: CaseOf) -> None:
    case = case_of(family)
    given = {"sources": case.sources, "data": case.data, "swaps": True, "dtype": "float32"}
    cpu, gpu = (moemerge.diagnose(case.merged, **given, device=d) for d in ("cpu", "cuda"))
    for one, two in zip(cpu.layers, gpu.layers, strict=True):
        for name in NEAR:
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-3), name
        # A token at a near tie may go the other way.
        assert two.mismatch == pytest.approx(one.mismatch, abs=0.01)
    for one, two in zip(cpu.swaps, gpu.swaps, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-4)
