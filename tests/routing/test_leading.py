"""The two-level method against its dense twin, and what `auto` does where a kind fails."""

from dataclasses import replace

import pytest
import torch

from moemerge.routing import DomainFeatures, Preconditioner, SolveSettings, preconditioners, solve
from moemerge.routing.cg import Diagonal, Ending, Patience, Status, cg
from moemerge.routing.curvature import Curvature
from moemerge.routing.leading import LeadingDirections, sketched_directions
from moemerge.routing.preconditioners import (
    BuiltPreconditioner,
    attempts,
    build,
)
from moemerge.routing.solve import build_operator, solve_system
from routing.problems import GATES, make_domains, operator_of

SOFTMAX = GATES["softmax"]


@pytest.mark.parametrize("curvature", list(Curvature))
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_correction_is_its_definition(gate, curvature, bias):
    operator = operator_of(make_domains(2, tokens=40, bias=bias), gate, curvature)
    leading = LeadingDirections(operator, sketched_directions(operator, 2))
    torch.manual_seed(0)
    y, r = (torch.randn(operator.shape, dtype=torch.float64) for _ in range(2))
    for given in (y, None):
        s, product = leading.corrected(operator, given, r)
        rest = r if given is None else r - operator.mv(given)
        twin = leading.prolong(leading.system.solve(leading.restrict(rest)))
        twin = twin if given is None else given + twin
        torch.testing.assert_close(s, twin, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(product, operator.mv(twin), rtol=1e-9, atol=1e-9)
        # No residual is left along the directions, but for the damping that keeps A_Z definite.
        rest = leading.restrict(r - product)
        assert float(rest.norm()) <= 1e-4 * float(leading.restrict(r).norm())


def hard_domains(seed, dead=False):
    """Means, a huge channel, sure routers."""
    rng = torch.Generator().manual_seed(seed)
    width, experts, tokens = 96, 8, 900
    spectrum = torch.arange(1, width + 1).float() ** -0.8
    base = 6 * torch.randn(experts, width, generator=rng) / width**0.5
    domains = []
    for name in "ab":
        x = torch.randn(tokens, width, generator=rng) * 5 * spectrum
        x += torch.randn(width, generator=rng)
        x[:, 3] += 20.0
        x /= x.square().mean(dim=1, keepdim=True).sqrt()
        router = base + 0.5 * torch.randn(experts, width, generator=rng) / width**0.5
        if dead:
            router[0, 3] -= 40.0
        domains.append(DomainFeatures(name, [x], router))
    return domains


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_hard_features_take_few_steps(seed, dead):
    domains = hard_domains(seed, dead)
    operator = build_operator(SOFTMAX, domains, SolveSettings())
    start = domains[0].router.double()
    steps = {}
    for kind in (Preconditioner.AUTO, Preconditioner.TWO_LEVEL, Preconditioner.JACOBI):
        solution = solve_system(operator, start, SolveSettings(preconditioner=kind))
        assert solution.cg.converged
        steps[kind] = solution.cg.steps
    assert steps[Preconditioner.TWO_LEVEL] <= 40 < steps[Preconditioner.JACOBI]
    assert steps[Preconditioner.AUTO] <= 60


def test_a_preconditioner_that_stalls_is_given_up(monkeypatch):
    domains = hard_domains(0)
    operator = build_operator(SOFTMAX, domains, SolveSettings())

    def with_a_bad_first(*args):
        spread = torch.logspace(-4, 4, operator.shape[1], dtype=torch.float64)
        bad = Diagonal(spread.expand(operator.shape).clone())
        built = BuiltPreconditioner(Preconditioner.TWO_LEVEL, bad, patience=Patience(8, 24))
        return [built, build(operator, jacobi)]

    jacobi = Preconditioner.JACOBI
    monkeypatch.setattr(solve, "attempts", with_a_bad_first)
    solution = solve_system(operator, domains[0].router.double(), SolveSettings())
    assert solution.cg.converged
    assert [t.status for t in solution.trials] == [Status.STALLED, Status.CONVERGED]
    assert solution.trials[0].steps <= 12
    assert solution.preconditioner is jacobi
    assert "two-level (stalled after" in solution.detour
    assert solution.cg.steps == sum(t.steps for t in solution.trials)
    assert len(solution.cg.residuals) == solution.cg.steps + 1


def test_autos_last_attempts_have_no_end():
    """Directions with Jacobi, and Jacobi alone for the case that these break down."""
    operator = build_operator(SOFTMAX, hard_domains(0), SolveSettings())
    *_, sturdy, last = attempts(operator, Preconditioner.AUTO)
    assert (sturdy.kind, sturdy.patience) == (Preconditioner.TWO_LEVEL, None)
    assert isinstance(sturdy.operator, Diagonal)
    assert (last.kind, last.patience) == (Preconditioner.JACOBI, None)


@pytest.mark.parametrize("sure", [False, True])
def test_autos_kronecker_is_helped_out_or_left_out(sure, monkeypatch):
    """As at sizes where it is the cheapest. Sure routers: a token has two experts to choose."""
    monkeypatch.setattr(preconditioners, "choose", lambda *_: Preconditioner.KRONECKER)
    rng = torch.Generator().manual_seed(0)
    x, router = torch.randn(400, 8, generator=rng), 0.1 * torch.randn(4, 8, generator=rng)
    x[:, 0].sign_()
    if sure:
        router[:, 0] = torch.tensor([50.0, 50.0, -50.0, -50.0])
    operator = build_operator(SOFTMAX, [DomainFeatures("a", [x], router)], SolveSettings())
    built = list(attempts(operator, Preconditioner.AUTO))
    rest = [Preconditioner.TWO_LEVEL, Preconditioner.TWO_LEVEL, Preconditioner.JACOBI]
    assert [one.kind for one in built] == [*([] if sure else [Preconditioner.KRONECKER]), *rest]
    if not sure:
        helped = built[0].deflation
        assert isinstance(helped, LeadingDirections)
        assert len(helped.directions) == 4


@pytest.mark.parametrize("alpha", [0.001, 0.99, 0.999])
def test_little_and_much_damping(alpha):
    """With little, every kind takes hundreds of steps: the directions are not given up."""
    domains = hard_domains(1)
    settings = SolveSettings(alpha=alpha, max_steps=3000)
    operator = build_operator(SOFTMAX, domains, settings)
    start = domains[0].router.double()
    jacobi = replace(settings, preconditioner=Preconditioner.JACOBI)
    auto, plain = (solve_system(operator, start, s) for s in (settings, jacobi))
    assert auto.cg.converged
    assert auto.cg.steps <= plain.cg.steps


def test_patience_counts_by_the_pace():
    falling = [10.0**-n for n in range(10)]
    assert not Patience(4, 10).is_over(falling, 1e-12)
    assert Patience(4, 10).is_over([1.0, *([0.9] * 10)], 1e-6)
    assert not Patience(4, 10).is_over([1.0, 0.9], 1e-6)  # too early to tell


def test_deflated_solves_are_the_same_from_run_to_run():
    domains = hard_domains(1)
    settings = SolveSettings(preconditioner=Preconditioner.TWO_LEVEL)
    one, other = (
        solve_system(build_operator(SOFTMAX, domains, settings), domains[0].router, settings)
        for _ in range(2)
    )
    assert torch.equal(one.weight, other.weight)


def test_deflation_never_meets_the_eigenvalues_it_solves_for():
    operator = operator_of(make_domains(2, width=12, experts=3, tokens=80))
    leading = LeadingDirections(operator, sketched_directions(operator, 6))
    jacobi = build(operator, Preconditioner.JACOBI).operator
    plain = cg(operator, operator.rhs(), preconditioner=jacobi, ending=Ending(rtol=1e-10))
    deflated = cg(
        operator,
        operator.rhs(),
        preconditioner=jacobi,
        deflation=leading,
        ending=Ending(rtol=1e-10),
    )
    assert deflated.converged
    assert deflated.steps < plain.steps
    torch.testing.assert_close(deflated.solution, plain.solution, rtol=1e-6, atol=1e-8)
