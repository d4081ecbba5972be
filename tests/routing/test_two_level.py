"""The two-level preconditioner against its dense twin, and on ill-conditioned features."""

from dataclasses import replace

import pytest
import torch

from moemerge.routing import Curvature, DomainFeatures, solve
from moemerge.routing.cg import Jacobi, cg
from moemerge.routing.solve import system
from moemerge.routing.two_level import REST_DAMPING, TwoLevel, direction_count, two_level_bytes
from routing.problems import (
    GATES,
    autograd_hessian,
    make_domains,
    operator_of,
    tokens_of,
)

SOFTMAX = GATES["softmax"]


@pytest.mark.parametrize("curvature", list(Curvature))
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("bias", [False, True])
def test_the_correction_is_its_definition(gate, curvature, bias):
    operator = operator_of(make_domains(2, tokens=40, bias=bias), gate, curvature)
    leading = TwoLevel(operator)
    torch.manual_seed(0)
    y, r = (torch.randn(operator.shape, dtype=torch.float64) for _ in range(2))
    for given in (y, None):
        s, product = leading.corrected(operator, given, r)
        rest = r if given is None else r - operator.mv(given)
        twin = leading.along_directions(rest @ leading.directions.T) @ leading.directions
        twin = twin if given is None else given + twin
        torch.testing.assert_close(s, twin, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(product, operator.mv(twin), rtol=1e-9, atol=1e-9)
        # No residual is left along the directions, but for the damping that keeps A_Z definite.
        left, before = ((v @ leading.directions.T).norm() for v in (r - product, r))
        assert float(left) <= 1e-4 * float(before)


@pytest.mark.parametrize("bias", [False, True])
def test_the_rest_is_the_inverse_of_a_kronecker_product(bias):
    domains = make_domains(2, tokens=25, bias=bias)
    built = TwoLevel(operator_of(domains))
    mean_h, gram, own = 0.0, 0.0, 0.0
    for domain in domains:
        x, targets = tokens_of(domain)
        h = torch.stack([autograd_hessian(SOFTMAX, z) for z in targets])
        diagonals = h.diagonal(dim1=1, dim2=2)
        mean_h = mean_h + h.mean(0)
        gram = gram + (x * diagonals.sum(-1)[:, None]).T @ x / len(x)
        own = own + torch.einsum("nk,nd->kd", diagonals, x * x) / len(x)
    c_h = mean_h / mean_h.diagonal().sqrt().outer(mean_h.diagonal().sqrt())
    c_x = gram / gram.diagonal().sqrt().outer(gram.diagonal().sqrt())
    damping = 0.9 * REST_DAMPING * torch.eye(own.numel(), dtype=torch.float64)
    root = own.reshape(-1).sqrt()
    dense = root[:, None] * (0.9 * torch.kron(c_h, c_x) + damping) * root
    basis = torch.eye(own.numel(), dtype=torch.float64).reshape(-1, *own.shape)
    matrix = torch.stack([built.rest(e).reshape(-1) for e in basis], dim=1)
    torch.testing.assert_close(matrix, torch.linalg.inv(dense), rtol=1e-8, atol=1e-8)


def hard_domains(seed, dead=False):
    """Means, a huge channel, confident routers."""
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
def test_ill_conditioned_features_take_few_steps(seed, dead):
    domains = hard_domains(seed, dead)
    start = domains[0].router.double()
    steps = {}
    for kind in ("two-level", "jacobi"):
        solution = solve(SOFTMAX, domains, start, preconditioner=kind)
        assert solution.converged
        assert solution.true_residual <= 1e-6
        steps[kind] = solution.steps
    assert steps["two-level"] <= 30 < 60 < steps["jacobi"]


@pytest.mark.parametrize("tokens", [20, 90, 200])
def test_fewer_tokens_than_features_take_few_steps(tokens):
    domains = [replace(d, features=[d.features[0][:tokens]]) for d in hard_domains(3)]
    solution = solve(SOFTMAX, domains, domains[0].router.double())
    assert solution.preconditioner == "two-level"
    assert solution.converged
    assert solution.steps <= 40


@pytest.mark.parametrize("alpha", [0.001, 0.99, 0.999])
def test_little_and_much_damping(alpha):
    domains = hard_domains(1)
    start = domains[0].router.double()
    auto, plain = (
        solve(SOFTMAX, domains, start, alpha=alpha, max_steps=3000, preconditioner=kind)
        for kind in ("auto", "jacobi")
    )
    assert auto.converged
    assert auto.steps <= plain.steps


def test_without_curvature_blending_the_diagonal_is_solved_in_one_step():
    domains = hard_domains(0)
    solution = solve(SOFTMAX, domains, domains[0].router.double(), alpha=0.0)
    assert (solution.preconditioner, solution.steps) == ("jacobi", 1)


def test_solves_are_the_same_from_run_to_run():
    domains = hard_domains(1)
    one, other = (solve(SOFTMAX, domains, domains[0].router) for _ in range(2))
    assert torch.equal(one.weight, other.weight)


def test_it_takes_fewer_steps_than_jacobi_to_the_same_solution():
    operator = operator_of(make_domains(2, width=12, experts=3, tokens=80))
    plain, deflated = (
        cg(operator, operator.rhs(), preconditioner=one, rtol=1e-10)
        for one in (Jacobi(operator.diagonal()), TwoLevel(operator))
    )
    assert deflated.converged
    assert deflated.steps < plain.steps
    torch.testing.assert_close(deflated.weight, plain.weight, rtol=1e-6, atol=1e-8)


def test_fewer_tokens_than_features_without_damping_stay_definite():
    (domain,) = make_domains(1, width=40, tokens=9)
    built = TwoLevel(system(SOFTMAX, [domain], alpha=1.0))
    inverse = built.inverse
    assert float(torch.linalg.eigvalsh((inverse + inverse.T) / 2).min()) > 0


@pytest.mark.parametrize("kind", ["none", "jacobi", "two-level"])
def test_dead_experts_and_empty_features_are_harmless(kind):
    domains = []
    for domain in make_domains(2, dtype=torch.float32, width=6, tokens=50):
        features = [x.clone() for x in domain.features]
        targets = []
        for x in features:
            x[:, 2] = 0.0  # a feature that is always zero
            z = x @ domain.router.T
            z[:, 1] = -1e4  # an expert whose probability underflows on every token
            targets.append(z)
        domains.append(replace(domain, features=features, targets=targets))
    assert float(system(SOFTMAX, domains).diagonal()[1].max()) == 0.0
    start = domains[0].router.double()
    solution = solve(SOFTMAX, domains, start, preconditioner=kind)
    assert solution.converged
    torch.testing.assert_close(solution.weight[1], start[1])  # unchanged
    torch.testing.assert_close(solution.weight[:, 2], start[:, 2])


def test_the_number_of_directions_follows_the_cost_of_a_product():
    assert direction_count((64, 2048)) == 32
    assert direction_count((128, 2048)) == 24
    assert direction_count((256, 7168)) == 16
    assert direction_count((8, 32)) == 8
    assert direction_count((4, 2)) == 1
    assert two_level_bytes((64, 2048), 4000, 4) < 2**30
