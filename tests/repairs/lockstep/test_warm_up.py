"""A warm-up runs beside, tells its errors to who waits, and takes part in no sum of all ranks."""

from types import SimpleNamespace

import pytest
import torch

from moemerge.config.repair_settings import CalibrationSettings, RefitSettings
from moemerge.errors import DataError
from moemerge.families.opened import open_model
from moemerge.families.rules import BiasPlace, Gate, Score
from moemerge.forward.settings import StreamSettings
from moemerge.repairs.calibration.layer import calibrate_layer
from moemerge.repairs.calibration.run import solve_once
from moemerge.repairs.lockstep import warm_up
from moemerge.repairs.lockstep.warm_up import WarmUp, random_router, router_like
from moemerge.repairs.refitting.run import fit_once
from moemerge.routing import SolveSettings
from moemerge.routing.cg import Status
from moemerge.runtime.ranks import SINGLE

CPU = torch.device("cpu")


GATES = {
    "softmax": Gate(score=Score.SOFTMAX, top_k=2),
    "sigmoid": Gate(score=Score.SIGMOID, top_k=2, selection_bias=BiasPlace.SCORES),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """The thread is started, and computes on the CPU."""
    monkeypatch.setattr(warm_up, "VALUES", 2**12)
    monkeypatch.setattr(warm_up, "NEEDS_NONE", ())


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_random_problem_is_solved(bias, gate):
    problem = random_router(gate, (6, 16), bias=bias, dtype=torch.float32, device=CPU)
    assert [domain.tokens for domain in problem.domains] == [256, 256]
    result = calibrate_layer(problem, SolveSettings(), start=problem.merged)
    assert result.status is Status.CONVERGED
    assert (result.bias is not None) == bias


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "olmoe"])
def test_it_runs_beside_and_tells_its_errors(family, zoo_folder, monkeypatch):
    model = open_model("merged", str(zoo_folder(family)))

    def work():
        fits = [(fit_once, RefitSettings(router=router)) for router in ("exact", "harc")]
        for run, settings in [(solve_once, CalibrationSettings()), *fits]:
            request = SimpleNamespace(settings=settings)
            run(SimpleNamespace(request=request, merged=model, stream=StreamSettings()))

    with WarmUp() as warm:
        warm.begin(CPU, work)
        warm.wait()
        warm.wait()
    monkeypatch.setattr(warm_up, "VALUES", 0)  # no token
    with WarmUp() as warm:
        warm.begin(CPU, work)
        with pytest.raises(DataError, match="has no token"):
            warm.wait()


def test_a_model_without_routers_has_nothing_to_solve(zoo_folder):
    model = open_model("merged", str(zoo_folder("llama")))
    assert router_like(model, CPU, torch.float32) is None


def test_a_full_gpu_is_for_the_run_to_tell():
    def full():
        raise torch.OutOfMemoryError("no room")

    with WarmUp() as warm:
        warm.begin(CPU, full)
        warm.wait()


def test_its_sums_are_its_own():
    """Under torchrun the text is read in parallel, and ranks exchange messages about that."""
    router = random_router(GATES["softmax"], (6, 16), bias=False, dtype=torch.float32, device=CPU)
    assert all(domain.ranks is SINGLE for domain in router.domains)
