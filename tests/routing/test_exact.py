from dataclasses import replace

import pytest
import torch

from moemerge.errors import UsageError
from moemerge.families.rules import Gate, Score
from moemerge.routing import DomainFeatures, Status, minimise_divergence, solve
from moemerge.routing.two_level import TwoLevel
from routing.problems import GATES, make_domains, naive_divergence, tokens_of

SOFTMAX = GATES["softmax"]


def objective(gate, domains, w):
    """Σ_i mean KL, token by token from the definition; differentiable."""
    total = torch.zeros((), dtype=torch.float64)
    for domain in domains:
        x, targets = tokens_of(domain)
        terms = [naive_divergence(gate, t, z) for t, z in zip(targets, x @ w.T, strict=True)]
        total = total + torch.stack(terms).mean()
    return total


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("source_targets", [False, True])
def test_gradient_vanishes_and_divergence_never_rises(gate, source_targets):
    domains = make_domains(2, tokens=60, source_targets=source_targets, bias=True)
    start = solve(gate, domains, domains[0].router).weight
    settings = dict(decrease_rtol=1e-10)
    result = minimise_divergence(gate, domains, start, **settings)
    assert result.converged, result
    assert list(result.kl) == sorted(result.kl, reverse=True)
    w = result.weight.clone().requires_grad_()
    value = objective(gate, domains, w)
    assert result.kl[-1] == pytest.approx(float(value.detach()), rel=1e-9)
    (gradient,) = torch.autograd.grad(value, w)
    assert float(gradient.norm()) == pytest.approx(result.gradient[-1], abs=1e-9)
    assert float(gradient.norm()) < 1e-3 * result.gradient[0]


def test_agrees_with_a_general_purpose_optimiser():
    domains = make_domains(2, tokens=40, move=1.0)
    start = domains[0].router
    result = minimise_divergence(SOFTMAX, domains, start, decrease_rtol=1e-12, max_steps=60)
    w = start.clone().requires_grad_()
    lbfgs = torch.optim.LBFGS(
        [w], max_iter=300, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def closure():
        lbfgs.zero_grad()
        x, targets = zip(*[tokens_of(d) for d in domains], strict=True)
        value = sum(
            torch.nn.functional.kl_div(
                (a @ w.T).log_softmax(-1), t.softmax(-1), reduction="batchmean"
            )
            for a, t in zip(x, targets, strict=True)
        )
        value.backward()
        return value

    lbfgs.step(closure)
    assert result.kl[-1] == pytest.approx(float(closure().detach()), rel=1e-6)
    got, want = (v - v.mean(0) for v in (result.weight, w.detach()))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_the_null_direction_stays_where_it_was():
    domains = make_domains(2, tokens=60)
    start = domains[0].router + torch.linspace(0, 3, 5, dtype=torch.float64)
    result = minimise_divergence(SOFTMAX, domains, start)
    torch.testing.assert_close(result.weight.mean(0), start.mean(0))


def test_a_perfect_start_is_left_alone():
    (domain,) = make_domains(1)
    result = minimise_divergence(SOFTMAX, [domain], domain.router)
    assert result.converged
    assert result.steps == 0
    assert torch.equal(result.weight, domain.router)


@pytest.mark.parametrize("factor", [-20.0, 0.0, 40.0])
def test_a_start_where_newton_steps_mislead_is_damped_until_they_do_not(factor):
    """Saturated routing has next to no curvature: whole steps are far too long, or cut to none."""
    domains = correlated_domains()
    result = minimise_divergence(SOFTMAX, domains, factor * domains[0].router, max_steps=100)
    assert result.converged, result.kl
    assert list(result.kl) == sorted(result.kl, reverse=True)
    near = minimise_divergence(SOFTMAX, domains, domains[0].router)
    assert result.kl[-1] == pytest.approx(near.kl[-1], rel=2e-3)


def correlated_domains():
    """Features with condition number 10⁴, and targets that no router meets."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
    spectrum = torch.logspace(0, -2, 32)
    base = torch.randn(12, 32, generator=generator)
    domains = []
    for name in ("a", "b"):
        x = torch.randn(3000, 32, generator=generator)
        x[:, :16] *= 1.0 + x[:, :1].abs()  # not Gaussian: experts differ in what they see
        router = base + 0.5 * torch.randn(12, 32, generator=generator)
        features = (x * spectrum) @ basis.T
        targets = features @ router.T + torch.randn(3000, 12, generator=generator)
        domains.append(DomainFeatures(name, [features], router, [targets]))
    return domains


def test_ill_conditioned_features_take_few_steps_to_the_minimum():
    domains = correlated_domains()
    start = solve(SOFTMAX, domains, domains[0].router).weight
    result = minimise_divergence(SOFTMAX, domains, start)
    assert result.converged
    assert result.steps <= 4
    assert result.inner_steps <= 40
    tight = dict(decrease_rtol=1e-8, max_steps=60, max_inner_steps=1000)
    minimum = minimise_divergence(SOFTMAX, domains, result.weight, **tight).kl[-1]
    assert minimum <= result.kl[-1] <= (1 + 1e-4) * minimum
    assert result.kl[0] > 1.01 * minimum  # there was something to do


def test_the_directions_are_found_once_while_whole_steps_succeed(monkeypatch):
    domains = correlated_domains()
    start = solve(SOFTMAX, domains, domains[0].router).weight
    built, original = [], TwoLevel.__init__
    monkeypatch.setattr(
        TwoLevel, "__init__", lambda self, operator: built.append(0) or original(self, operator)
    )
    result = minimise_divergence(SOFTMAX, domains, start)
    assert result.steps > 1
    assert len(built) == 1
    built.clear()
    assert minimise_divergence(SOFTMAX, domains, -5.0 * start).steps > 1
    assert len(built) > 1  # on the way from there it changes


def test_a_promise_of_an_unfinished_system_is_no_convergence():
    domains = correlated_domains()
    start = solve(SOFTMAX, domains, domains[0].router).weight
    settings = dict(preconditioner="jacobi", decrease_rtol=0.5, max_inner_steps=1, max_steps=3)
    result = minimise_divergence(SOFTMAX, domains, start, **settings)
    assert result.status is Status.MAX_STEPS
    assert list(result.kl) == sorted(result.kl, reverse=True)


def test_targets_that_can_all_be_met_end_the_descent():
    """Fewer tokens than features: the divergence falls towards 0 for ever."""
    generator = torch.Generator().manual_seed(1)
    domains = [
        DomainFeatures(
            name,
            [torch.randn(12, 40, generator=generator)],
            torch.randn(6, 40, generator=generator).double(),
        )
        for name in ("a", "b")
    ]
    start = solve(SOFTMAX, domains, domains[0].router).weight
    result = minimise_divergence(SOFTMAX, domains, start)
    assert result.converged, result.kl
    assert result.kl[-1] < 1e-4 * result.kl[0]


def steep_domains():
    """Clusters, a steep spectrum and an offset, as in trained models; targets nobody meets."""
    generator = torch.Generator().manual_seed(0)
    tokens, width, experts = 1000, 64, 8

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    basis = torch.linalg.qr(normal(width, width))[0]
    spectrum = torch.arange(1, width + 1) ** -1.5
    base = 3 * normal(experts, width) / width**0.5
    domains = []
    for name in "ab":
        centres = normal(8, width)[torch.randint(0, 8, (tokens,), generator=generator)]
        x = ((normal(tokens, width) + centres) * spectrum) @ basis.T
        x[:, :2] += 5.0
        x = x / x.square().mean(dim=1, keepdim=True).sqrt()
        router = base + 1.5 * normal(experts, width) / width**0.5
        targets = x @ router.T + 0.7 * normal(tokens, experts)
        domains.append(DomainFeatures(name, [x], router, [targets]))
    return domains


def test_a_quadratic_solution_worse_than_the_merged_router_is_no_start():
    domains, gate = steep_domains(), Gate(Score.SIGMOID, 2)
    merged = torch.stack([domain.router for domain in domains]).mean(dim=0)
    quadratic = solve(gate, domains, merged).weight
    result = minimise_divergence(gate, domains, quadratic, fallback=merged)
    assert result.converged
    far, near = (float(objective(gate, domains, w.double())) for w in (quadratic, merged))
    assert far > 2 * near  # saturated sigmoids: the quadratic model is of no use
    assert result.kl[:2] == pytest.approx((far, near))
    assert result.kl[-1] < 0.6 * near
    assert result.steps == len(result.kl) - 2
    assert list(result.kl) == sorted(result.kl, reverse=True)


@pytest.fixture(scope="module")
def steep():
    """A router to start from, and the least divergence of `steep_domains`."""
    domains = steep_domains()
    start = solve(SOFTMAX, domains, domains[0].router).weight
    tight = dict(decrease_rtol=1e-8, max_steps=100, max_inner_steps=2000)
    return start, minimise_divergence(SOFTMAX, domains, start, **tight).kl[-1]


@pytest.mark.parametrize("kind", ["none", "auto"])
def test_convergence_is_not_claimed_far_from_the_minimum(kind, steep):
    domains, (start, minimum) = steep_domains(), steep
    result = minimise_divergence(SOFTMAX, domains, start, preconditioner=kind)
    assert result.kl[-1] < 1.05 * minimum
    assert not result.converged or result.kl[-1] < 1.03 * minimum
    if kind == "auto":
        assert result.converged
        assert result.kl[-1] < 1.005 * minimum


def first_layer(dtype):
    """Token directions by Zipf's law, with a little context: a steep spectrum, as real layers."""
    generator = torch.Generator().manual_seed(0)
    tokens, width, experts, vocabulary = 2000, 96, 12, 1500

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    basis = torch.linalg.qr(normal(width, width))[0]
    table = (normal(vocabulary, width) * torch.logspace(0, -2.5, width)) @ basis
    shares = 1.0 / torch.arange(1, vocabulary + 1)
    base = 6 * normal(experts, width) / width**0.5
    domains = []
    for name in "ab":
        order = torch.randperm(vocabulary, generator=generator)
        drawn = torch.multinomial(shares, tokens, replacement=True, generator=generator)
        x = table[order[drawn]]
        x[1:] += 0.1 * x[:-1]
        x = x / x.square().mean(dim=1, keepdim=True).sqrt()
        router = base + normal(experts, width) / width**0.5
        domains.append(DomainFeatures(name, [x.to(dtype)], router))
    return domains


def test_a_first_layer_converges():
    domains = first_layer(torch.bfloat16)
    start = solve(SOFTMAX, domains, domains[0].router).weight
    wide = [replace(d, features=[x.double() for x in d.features]) for d in domains]
    tight = dict(decrease_rtol=1e-4, max_inner_steps=3000)
    minimum = minimise_divergence(SOFTMAX, wide, start, **tight).kl[-1]
    result = minimise_divergence(SOFTMAX, domains, start)
    assert result.converged
    assert result.inner_steps <= 600  # with the damping of the quadratic system, 1273
    assert result.kl[-1] < (1 + 1e-3) * minimum


def test_settings_are_refused():
    (domain,) = make_domains(1)
    for name, value in (("damping", 0.0), ("max_steps", -1)):
        with pytest.raises(UsageError, match=name):
            minimise_divergence(SOFTMAX, [domain], domain.router, **{name: value})
