from dataclasses import replace

import pytest
import torch

from moemerge.routing.cg import Ending, cg
from moemerge.routing.curvature import Curvature
from moemerge.routing.inverses import cholesky
from moemerge.routing.preconditioners import (
    KRONECKER_DAMPING,
    NEWTON_STEPS,
    Preconditioner,
    build,
    choose,
    costs,
    matrix_bytes,
)
from routing.problems import (
    GATES,
    as_matrix,
    autograd_hessian,
    dense_system,
    make_domains,
    operator_of,
    tokens_of,
)

SOFTMAX = GATES["softmax"]
KRONECKER_FIRST = (Preconditioner.AUTO, Preconditioner.KRONECKER, Preconditioner.TWO_LEVEL)
KINDS = [kind for kind in Preconditioner if kind is not Preconditioner.AUTO]


def dense_kronecker(domains, dense, diagonal):
    """S^½ (a C_H ⊗ C_X + c I) S^½ with every piece written out from the definition."""
    mean_h = 0.0
    gram = 0.0
    own = 0.0
    for domain in domains:
        x, targets = tokens_of(domain)
        h = torch.stack([autograd_hessian(SOFTMAX, z) for z in targets])
        trace = h.diagonal(dim1=1, dim2=2).sum(-1)
        mean_h = mean_h + h.mean(0)
        gram = gram + (x * trace[:, None]).T @ x / len(x)
        own = own + torch.einsum("nk,nd->kd", h.diagonal(dim1=1, dim2=2), x * x) / len(x)
    c_h = mean_h / mean_h.diagonal().sqrt().outer(mean_h.diagonal().sqrt())
    c_x = gram / gram.diagonal().sqrt().outer(gram.diagonal().sqrt())
    bracket = dense * torch.kron(c_h, c_x) + diagonal * torch.eye(own.numel(), dtype=torch.float64)
    root = own.reshape(-1).sqrt()
    return root[:, None] * bracket * root


@pytest.mark.parametrize(("dense", "diagonal"), [(0.9, 0.1), (0.5, 0.5), (1.0, 0.15)])
@pytest.mark.parametrize("bias", [False, True])
def test_kronecker_inverts_its_dense_twin(bias, dense, diagonal):
    domains = make_domains(2, tokens=25, bias=bias)
    built = build(operator_of(domains, dense=dense, diagonal=diagonal), Preconditioner.KRONECKER)
    matrix = as_matrix(built.operator)
    expected = torch.linalg.inv(dense_kronecker(domains, dense, diagonal))
    torch.testing.assert_close(matrix, expected, rtol=1e-8, atol=1e-8)
    assert built.jitter == 0.0


@pytest.mark.parametrize("curvature", list(Curvature))
def test_block_inverts_the_experts_blocks_of_the_dense_twin(curvature):
    domains = make_domains(2, tokens=25, bias=True)
    built = build(operator_of(domains, curvature=curvature), Preconditioner.BLOCK)
    a, _ = dense_system(SOFTMAX, domains, curvature, 0.9, 0.1)
    matrix = as_matrix(built.operator)
    width = 6
    expected = torch.zeros_like(a)
    for expert in range(4):
        part = slice(expert * width, (expert + 1) * width)
        expected[part, part] = torch.linalg.inv(a[part, part])
    torch.testing.assert_close(matrix, expected, rtol=1e-8, atol=1e-8)


def test_jacobi_inverts_the_diagonal():
    domains = make_domains(2, tokens=25)
    matrix = as_matrix(build(operator_of(domains), Preconditioner.JACOBI).operator)
    a, _ = dense_system(SOFTMAX, domains, Curvature.FULL, 0.9, 0.1)
    torch.testing.assert_close(matrix, torch.diag(1 / a.diagonal()))


@pytest.mark.parametrize(
    ("gate", "curvature"),
    [
        *((gate, Curvature.FULL) for gate in GATES.values()),
        *((SOFTMAX, curvature) for curvature in (Curvature.DIAGONAL, Curvature.IDENTITY)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_all_are_symmetric_positive_definite_and_reach_the_same_solution(kind, curvature, gate):
    operator = operator_of(make_domains(3, tokens=40), curvature=curvature, gate=gate)
    built = build(operator, kind)
    assert built.kind is kind
    matrix = as_matrix(built.operator)
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-9, atol=1e-9 * float(matrix.abs().max()))
    assert float(torch.linalg.eigvalsh(matrix).min()) > 0
    result = cg(operator, operator.rhs(), preconditioner=built.operator, ending=Ending(rtol=1e-11))
    assert result.converged
    expected = torch.linalg.solve(as_matrix(operator), operator.rhs().reshape(-1))
    torch.testing.assert_close(result.solution.reshape(-1), expected, rtol=1e-6, atol=1e-7)


def test_kronecker_is_exact_for_identity_curvature_of_one_domain():
    operator = operator_of(make_domains(1, width=12, tokens=80), curvature=Curvature.IDENTITY)
    built = build(operator, Preconditioner.KRONECKER)
    result = cg(operator, operator.rhs(), preconditioner=built.operator, ending=Ending(rtol=1e-10))
    assert result.converged
    assert result.steps == 1


@pytest.mark.parametrize("kind", [Preconditioner.BLOCK, Preconditioner.KRONECKER])
def test_fewer_tokens_than_features_without_damping_stay_definite(kind):
    operator = operator_of(make_domains(1, width=40, tokens=9), dense=1.0, diagonal=0.0)
    built = build(operator, kind)
    # Kronecker's own damping is at work anyway; a factorisation says what it needed.
    assert (built.jitter > 0) == (kind is Preconditioner.BLOCK)
    assert float(torch.linalg.eigvalsh(as_matrix(built.operator)).min()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_dead_experts_and_empty_features_are_harmless(kind):
    domains = []
    for domain in make_domains(2, dtype=torch.float32, width=6, tokens=50):
        features = [x.clone() for x in domain.features]
        targets = []
        for x in features:
            x[:, 2] = 0.0  # a feature that never fires
            z = x @ domain.router.T
            z[:, 1] = -1e4  # an expert whose probability underflows on every token
            targets.append(z)
        domains.append(replace(domain, features=features, targets=targets))
    operator = operator_of(domains)
    assert float(operator.diagonal()[1].max()) == 0.0
    start = domains[0].router.double()
    built = build(operator, kind)
    result = cg(operator, operator.rhs(), start=start, preconditioner=built.operator)
    assert result.converged
    torch.testing.assert_close(result.solution[1], start[1])  # untouched
    torch.testing.assert_close(result.solution[:, 2], start[:, 2])


@pytest.mark.parametrize("damping", [1e-5, 1e-3])
def test_kronecker_keeps_more_damping_than_a_hardly_damped_system_has(damping):
    """With the system's own it would trust its small eigenvalues, which are wrong."""
    domains = make_domains(2, tokens=25)
    built = build(operator_of(domains, dense=1.0, diagonal=damping), Preconditioner.KRONECKER)
    expected = torch.linalg.inv(dense_kronecker(domains, 1.0, KRONECKER_DAMPING))
    torch.testing.assert_close(as_matrix(built.operator), expected, rtol=1e-8, atol=1e-8)


def test_cholesky_of_a_block_below_the_smallest_normal_number():
    """A confident router leaves an expert a curvature that rounds to a few denormal numbers."""
    tiny = torch.full((3, 3), 1.4e-45) + torch.diag(torch.tensor([2.8e-45, 1.1e-44, 1.4e-45]))
    blocks = torch.stack([2.0 * torch.eye(3), tiny, torch.zeros(3, 3)])
    factors, jitter = cholesky(blocks)
    expected = torch.stack([0.5 * torch.eye(3), torch.eye(3), torch.eye(3)])
    torch.testing.assert_close(torch.cholesky_inverse(factors), expected)
    assert jitter == 0.0


def test_cholesky_reports_the_jitter_it_needed():
    good = torch.eye(3).expand(2, 3, 3).clone()
    assert cholesky(good)[1] == 0.0
    singular = torch.ones(1, 3, 3)
    factors, jitter = cholesky(singular)
    assert 0.0 < jitter <= 1e-5
    assert torch.isfinite(factors).all()


def test_auto_takes_what_the_shape_makes_cheapest():
    def taken(experts, width, tokens):
        return choose((experts, width), tokens, torch.float32)

    assert taken(8, 32, 500) is Preconditioner.BLOCK
    # An eigendecomposition costs more than all of the two-level method, but not twice as much.
    assert taken(64, 2048, 20_000) is Preconditioner.KRONECKER
    assert taken(64, 2048, 1_000_000) is Preconditioner.KRONECKER
    assert taken(128, 2048, 1_000_000) is Preconditioner.KRONECKER
    # Twice as many tokens as features, or fewer: a Gram matrix of them misleads.
    assert taken(64, 2048, 4_000) is Preconditioner.TWO_LEVEL
    assert taken(64, 2048, 1_000) is Preconditioner.TWO_LEVEL
    assert taken(512, 8192, 300) is not Preconditioner.KRONECKER
    assert Preconditioner.BLOCK not in costs((256, 7168), 10_000, torch.float32)  # would not fit


def test_auto_takes_blocks_for_newton_systems_of_narrow_models():
    def taken(experts, width, tokens):
        return choose((experts, width), tokens, torch.float32, NEWTON_STEPS)

    assert taken(24, 96, 20_000) is Preconditioner.BLOCK
    assert taken(32, 128, 23_000) is Preconditioner.BLOCK
    assert taken(64, 512, 8_000) is Preconditioner.KRONECKER
    assert taken(64, 2048, 1 << 20) is Preconditioner.KRONECKER
    assert taken(64, 2048, 4_000) is Preconditioner.TWO_LEVEL  # too few tokens for one Gram matrix


def test_memory_is_that_of_the_kind_that_is_built():
    """OLMoE's blocks would take gigabytes; `auto` never builds them, so nobody needs them."""
    shape, tokens = (64, 2048), 4_000
    needed = {kind: matrix_bytes(kind, shape, tokens, torch.float32) for kind in Preconditioner}
    assert needed[Preconditioner.AUTO] == needed[Preconditioner.TWO_LEVEL] < 2**29
    assert needed[Preconditioner.JACOBI] == needed[Preconditioner.NONE] == 0
    assert needed[Preconditioner.BLOCK] >= 3 * 64 * 2048**2 * 4
    # Where `auto` begins with Kronecker, its factors stay beside what comes after.
    many = [matrix_bytes(kind, shape, 1 << 20, torch.float32) for kind in KRONECKER_FIRST]
    assert many[0] == many[1] + many[2]
