"""The kernel's sums against those of plain torch, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from moemerge.architectures.rules import Gate, Score
from moemerge.kernels.agreement import FIGURES, agreement, usable
from moemerge.routing.figures import MODERATE_SHIFT, SMALL_SHIFT, RouterOutput, Tokens
from moemerge.routing.measure import FigureSums

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
    gate = Gate(Score.SOFTMAX, top_k)
    # The kernel widens the logits before it takes the distance of theirs.
    wanted, made = (RouterOutput.of(gate, z.double()) for z in (target, logits))
    plain = FigureSums([*FIGURES, "load", "load_source"])
    plain.add(Tokens(wanted, made, moved=wanted))
    expected = plain.result()
    sums, loads = agreement(target, logits, top_k, (SMALL_SHIFT, MODERATE_SHIFT))
    for name, value in zip(FIGURES, (sums / tokens).tolist(), strict=True):
        assert value == pytest.approx(expected.figures[name], rel=1e-10, abs=1e-10), name
    shares = (loads.double() / (tokens * top_k)).tolist()
    for share, load in zip(shares, (expected.load_source, expected.load), strict=True):
        assert share == pytest.approx(load, rel=1e-12)


def test_a_cpu_is_served_by_plain_torch() -> None:
    assert not usable(torch.zeros(2, 3), torch.zeros(2, 3))
