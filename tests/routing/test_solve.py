"""The whole layer solve against a dense float64 Algorithm 1 that shares no code with it."""

from dataclasses import replace

import pytest
import torch

from moemerge.errors import DataError, UsageError
from moemerge.routing import (
    Curvature,
    DomainFeatures,
    Status,
    measure_routers,
    solve,
)
from moemerge.routing.solve import PRECONDITIONERS
from moemerge.routing.two_level import TwoLevel
from repairs.calibration.dense import algorithm_one
from routing.problems import GATES, make_domains

SOFTMAX = GATES["softmax"]


def problem(sources, dtype):
    generator = torch.Generator().manual_seed(11 + sources)
    mixing = torch.randn(12, 12, generator=generator) / 3
    base = torch.randn(8, 12, generator=generator)
    features = [
        (torch.randn(90 + 37 * i, 12, generator=generator) @ mixing).to(dtype)
        for i in range(sources)
    ]
    routers = [
        (base + 0.4 * torch.randn(8, 12, generator=generator)).to(dtype) for _ in range(sources)
    ]
    start = base + 0.6 * torch.randn(8, 12, generator=generator)
    return features, routers, start.to(dtype)


@pytest.mark.parametrize(("sources", "regulariser"), [(2, {"alpha": 0.5}), (3, {"gamma": 0.15})])
@pytest.mark.parametrize("curvature", list(Curvature))
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_algorithm_one(dtype, preconditioner, curvature, sources, regulariser):
    features, routers, start = problem(sources, dtype)
    key = (dtype, sources, curvature, tuple(regulariser.items()))
    if key not in _EXPECTED:
        _EXPECTED[key] = algorithm_one(features, routers, curvature.value, **regulariser)
    expected = _EXPECTED[key]
    domains = [
        DomainFeatures(str(i), list(x.split(41)), w)
        for i, (x, w) in enumerate(zip(features, routers, strict=True))
    ]
    solution = solve(
        SOFTMAX, domains, start, **regulariser, curvature=curvature, preconditioner=preconditioner
    )
    assert solution.status is Status.CONVERGED
    assert solution.true_residual <= 1e-6
    move = (expected - start.double()).norm()
    assert float((solution.weight - expected).norm() / move) <= 1e-4


_EXPECTED = {}


def test_one_source_gets_its_own_router_back():
    (domain,) = make_domains(1, tokens=80)
    solution = solve(SOFTMAX, [domain], domain.router + 0.5, rtol=1e-12)
    torch.testing.assert_close(solution.weight, domain.router)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("source_targets", [False, True])
def test_divergence_falls_for_every_gate(gate, source_targets):
    domains = make_domains(2, experts=6, width=10, tokens=300, move=0.15, bias=True, seed=4)

    def drifted(domain):
        own = (x + 0.1 * torch.randn_like(x) for x in domain.features)
        weight, bias = domain.router[:, :-1], domain.router[:, -1]
        return replace(domain, targets=[x @ weight.T + bias for x in own])

    if source_targets:  # the source's own features are a little off the merged model's
        torch.manual_seed(0)
        domains = [drifted(domain) for domain in domains]
    start = domains[0].router + 0.4 * torch.randn_like(domains[0].router)
    solution = solve(gate, domains, start)
    before = sum(measure_routers(gate, d, [start])[0].kl for d in domains)
    after = sum(measure_routers(gate, d, [solution.weight])[0].kl for d in domains)
    assert solution.converged
    assert after < 0.7 * before


def test_source_targets_reach_the_source_where_merged_features_cannot():
    """If merged features are an invertible map of the source's, the fitted router undoes it."""
    torch.manual_seed(2)
    own = torch.randn(400, 6, dtype=torch.float64)
    drift = torch.eye(6, dtype=torch.float64) + 0.2 * torch.randn(6, 6, dtype=torch.float64)
    router = torch.randn(5, 6, dtype=torch.float64)
    domain = DomainFeatures("a", [own @ drift.T], router, [own @ router.T])
    solution = solve(SOFTMAX, [domain], router, alpha=1.0, rtol=1e-9)
    expected = router @ torch.linalg.inv(drift)
    got, want = (w - w.mean(0) for w in (solution.weight, expected))  # up to a common shift
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_gamma_and_alpha_agree_where_they_are_the_same_problem():
    domains = make_domains(2)
    start = domains[0].router
    one = solve(SOFTMAX, domains, start, alpha=0.8, rtol=1e-12).weight
    other = solve(SOFTMAX, domains, start, gamma=0.25, rtol=1e-12).weight
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)  # 0.2 / 0.8 = 0.25


def test_not_converged_is_a_status_not_an_error():
    domains = make_domains(2, experts=8, width=30, tokens=200)
    start = torch.zeros(8, 30)
    solution = solve(SOFTMAX, domains, start, max_steps=2, preconditioner="none")
    assert solution.status is Status.MAX_STEPS
    assert solution.preconditioner == "none"


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.9, "gamma": 0.1},
        {"alpha": 1.5},
        {"gamma": -1.0},
        {"rtol": 0.0},
        {"max_steps": 0},
        {"preconditioner": "kronecker"},
    ],
)
def test_settings_are_refused(wrong):
    (domain,) = make_domains(1)
    with pytest.raises(UsageError):
        solve(SOFTMAX, [domain], domain.router, **wrong)


def test_jacobi_follows_a_two_level_method_that_breaks_down(monkeypatch):
    monkeypatch.setattr(TwoLevel, "rest", lambda self, r: -10.0 * r)
    domains = make_domains(2)
    start = domains[0].router + 0.1
    solution = solve(SOFTMAX, domains, start)
    assert solution.converged
    assert [t.preconditioner for t in solution.trials] == ["two-level", "jacobi"]
    assert solution.trials[0].status is Status.NON_POSITIVE_CURVATURE
    assert solution.detour.startswith("solved with jacobi, after abandoning two-level (non_pos")
    assert solution.steps == sum(t.steps for t in solution.trials)
    assert len(solution.residuals) == solution.steps + 1
    alone = solve(SOFTMAX, domains, start, preconditioner="two-level")
    assert alone.status is Status.NON_POSITIVE_CURVATURE


def test_shapes_are_refused_by_name():
    one, _ = make_domains(2)
    other = make_domains(1, experts=7)[0]
    with pytest.raises(DataError, match=r"domain0 \(4, 5\)"):
        solve(SOFTMAX, [one, DomainFeatures("other", other.features, other.router)], one.router)
    with pytest.raises(DataError, match="merged router"):
        solve(SOFTMAX, [one], torch.zeros(3, 5))
    with pytest.raises(DataError, match="no domain"):
        solve(SOFTMAX, [], torch.zeros(3, 5))
