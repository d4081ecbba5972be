"""The kernel's sums against those of plain torch, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from moemerge.architectures.gates import Gate, Score
from moemerge.kernels.agreement import agreement, usable
from moemerge.routing.metrics import MODERATE_SHIFT, SMALL_SHIFT, MetricsAccumulator

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED),
    reason="needs a CUDA device, or triton and TRITON_INTERPRET=1",
)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(300, 64, 8), (33, 12, 2), (5, 130, 4)])
@pytest.mark.parametrize("move", [0.0, 0.1, 5.0])
def test_sums_are_those_of_plain_torch(tokens: int, experts: int, top_k: int, move: float) -> None:
    torch.manual_seed(tokens)
    target = 2.0 * torch.randn(tokens, experts, device=DEVICE)
    logits = target + move * torch.randn(tokens, experts, device=DEVICE)
    plain = MetricsAccumulator(Gate(Score.SOFTMAX, top_k))
    plain.update(target, logits)
    sums, loads = agreement(target, logits, top_k, (SMALL_SHIFT, MODERATE_SHIFT))
    assert plain._sums is not None
    assert plain._loads is not None
    torch.testing.assert_close(sums, plain._sums, rtol=1e-10, atol=1e-10)
    assert torch.equal(loads, plain._loads)


def test_a_cpu_is_served_by_plain_torch() -> None:
    assert not usable(torch.zeros(2, 3), torch.zeros(2, 3))
