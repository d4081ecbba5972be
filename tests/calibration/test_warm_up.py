"""The random problem of a warm-up is a sound one, and its errors are told by who waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from calibration import cases
from moemerge.architectures.gates import BiasPlace, Gate, Score
from moemerge.architectures.opened import open_model
from moemerge.calibration import warm_up
from moemerge.calibration.layer import calibrate_layer
from moemerge.calibration.warm_up import WarmUp, random_problem
from moemerge.errors import DataError
from moemerge.linalg.cg import Status
from moemerge.routing import SolveSettings

CPU = torch.device("cpu")


GATES = {
    "softmax": Gate(score=Score.SOFTMAX, top_k=2),
    "sigmoid": Gate(score=Score.SIGMOID, top_k=2, selection_bias=BiasPlace.SCORES),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_random_problem_is_solved(
    bias: bool, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "VALUES", 2**12)
    problem = random_problem(gate, (6, 16), bias=bias, dtype=torch.float32, device=CPU)
    assert [domain.tokens for domain in problem.domains] == [256, 256]
    result = calibrate_layer(problem, SolveSettings(), start=problem.merged)
    assert result.status is Status.CONVERGED
    assert (result.bias is not None) == bias


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "olmoe"])
def test_it_runs_beside_and_tells_its_errors(
    family: str, case_of: Callable[..., cases.Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "VALUES", 2**12)
    # A stand-in for a GPU: the thread is started, and computes on the CPU.
    monkeypatch.setattr(warm_up, "NEEDS_NONE", ())
    model = open_model("merged", case_of(family).merged)
    with WarmUp(SolveSettings()) as warm:
        warm.begin(model, CPU, torch.float32)
        warm.wait()
        warm.wait()
    monkeypatch.setattr(warm_up, "VALUES", 0)  # no token
    with WarmUp(SolveSettings()) as warm:
        warm.begin(model, CPU, torch.float32)
        with pytest.raises(DataError, match="has no token"):
            warm.wait()


def test_a_full_gpu_is_for_the_run_to_tell(
    case_of: Callable[..., cases.Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(warm_up, "NEEDS_NONE", ())
    monkeypatch.setattr(warm_up, "random_problem", full)
    with WarmUp(SolveSettings()) as warm:
        warm.begin(open_model("merged", case_of("olmoe").merged), CPU, torch.float32)
        warm.wait()
