from dataclasses import replace

import pytest
import torch

from moemerge.errors import DataError, NumericalError
from moemerge.families.rules import Gate, Score
from moemerge.routing import products as module
from moemerge.routing.cg import cg
from moemerge.routing.curvature import (
    Curvature,
    DomainCurvature,
    RouterCurvature,
    token_weights,
)
from routing.problems import (
    GATES,
    as_matrix,
    autograd_hessian,
    dense_system,
    make_domains,
    naive_divergence,
    operator_of,
    tokens_of,
)

SOFTMAX = GATES["softmax"]
each_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
each_curvature = pytest.mark.parametrize("curvature", list(Curvature))


@each_gate
def test_token_curvature_equals_the_autograd_hessian(gate):
    torch.manual_seed(0)
    z = 2.0 * torch.randn(7, 5, dtype=torch.float64)
    full = token_weights(gate, z, Curvature.FULL, torch.float64)
    diagonal = token_weights(gate, z, Curvature.DIAGONAL, torch.float64)
    for index, token in enumerate(z):
        expected = autograd_hessian(gate, token)
        columns = [full.apply(v.expand(7, 5))[index] for v in torch.eye(5, dtype=torch.float64)]
        torch.testing.assert_close(torch.stack(columns, 1), expected, rtol=1e-9, atol=1e-12)
        own = expected.diagonal()
        torch.testing.assert_close(full.own(z)[index], own, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(diagonal.own(z)[index], own, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dense", "diagonal"), [(0.9, 0.1), (1.0, 0.15)])
@each_curvature
@pytest.mark.parametrize("count", [1, 3])
def test_operator_equals_its_dense_twin(count, curvature, dense, diagonal):
    domains = make_domains(count, tokens=20)
    operator = operator_of(domains, curvature=curvature, dense=dense, diagonal=diagonal)
    a, b = dense_system(SOFTMAX, domains, curvature, dense, diagonal)
    matrix = as_matrix(operator)
    torch.testing.assert_close(matrix, a, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(operator.diagonal().reshape(-1), a.diagonal())
    torch.testing.assert_close(operator.rhs().reshape(-1), b, rtol=1e-10, atol=1e-13)
    assert torch.allclose(matrix, matrix.T, atol=1e-14)
    assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-13


@each_gate
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("source_targets", [False, True])
def test_every_gate_with_bias_columns_and_source_targets(gate, bias, source_targets):
    domains = make_domains(2, tokens=15, bias=bias, source_targets=source_targets)
    assert domains[0].has_bias is bias
    operator = operator_of(domains, gate)
    a, b = dense_system(gate, domains, Curvature.FULL, 0.9, 0.1)
    torch.testing.assert_close(as_matrix(operator), a, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(operator.rhs().reshape(-1), b, rtol=1e-8, atol=1e-12)
    solved = cg(operator, operator.rhs(), rtol=1e-12).weight.reshape(-1)
    torch.testing.assert_close(solved, torch.linalg.solve(a, b), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precisions(dtype):
    domains = make_domains(2, dtype=dtype, experts=6, width=16, tokens=300)
    operator = operator_of(domains)
    assert operator.dtype is torch.float32
    wide = [
        replace(d, features=[x.double() for x in d.features], router=d.router.double())
        for d in domains
    ]
    exact = operator_of(wide)
    v = torch.randn(6, 16, dtype=torch.float64)
    want = exact.mv(v)

    def error(got):
        return float((got - want).norm() / want.norm())

    assert operator.mv(v).dtype is torch.float64
    assert error(operator.mv(v)) < 1e-6
    assert error(operator.accurate().mv(v)) < 3e-7  # H is kept in float32
    assert float((operator.rhs() - exact.rhs()).norm() / exact.rhs().norm()) < 1e-5
    # What H's rounding does to b it does to A as well, so that it does not reach the solution.
    single = [
        RouterCurvature([s], dense=0.9, diagonal=0.1).accurate().mv(s.router)
        for s in operator.curvatures
    ]
    torch.testing.assert_close(operator.rhs(), torch.stack(single).sum(0), rtol=1e-10, atol=1e-12)


def test_chunks_do_not_change_the_answer(monkeypatch):
    domains = make_domains(2, tokens=50, source_targets=True)
    v = torch.randn(4, 5, dtype=torch.float64)
    whole = operator_of(domains)
    want = whole.mv(v), whole.rhs(), whole.diagonal()
    monkeypatch.setattr(module, "CPU_ROWS", 7)
    parts = operator_of(domains)
    for got, expected in zip((parts.mv(v), parts.rhs(), parts.diagonal()), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


def test_each_domain_counts_the_same_whatever_its_size():
    small, large = make_domains(2, tokens=30)
    doubled = replace(large, features=list(large.features) * 5)
    one = operator_of([small, large])
    other = operator_of([small, doubled])
    torch.testing.assert_close(as_matrix(one), as_matrix(other))
    torch.testing.assert_close(one.rhs(), other.rhs())


@pytest.mark.parametrize("score", [Score.SOFTMAX, Score.SIGMOID])
def test_rounding_never_makes_the_curvature_indefinite(score):
    torch.manual_seed(1)
    z = 30.0 * torch.randn(2000, 8, dtype=torch.float64)  # nearly certain routing
    weights = token_weights(Gate(score, 2), z, Curvature.FULL, torch.float32)
    assert weights.diagonal is not None
    assert weights.rank_one is not None
    b, a = weights.diagonal.double(), weights.rank_one.double()
    h = torch.diag_embed(b) - a.unsqueeze(2) * a.unsqueeze(1)
    smallest = torch.linalg.eigvalsh(h)[:, 0]
    assert float(smallest.min()) > -1e-15


def test_newton_statistics_are_gradient_and_hessian_of_the_mean_divergence():
    for source_targets in (False, True):
        (domain,) = make_domains(1, tokens=15, source_targets=source_targets)
        at = torch.randn(4, 5, dtype=torch.float64)
        x, targets = tokens_of(domain)

        def objective(flat, x=x, targets=targets):
            z = x @ flat.reshape(4, 5).T
            return torch.stack(
                [naive_divergence(SOFTMAX, t, v) for t, v in zip(targets, z, strict=True)]
            ).mean()

        flat = at.reshape(-1).clone().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(flat), flat)
        one = DomainCurvature(SOFTMAX, domain, at=at)
        torch.testing.assert_close(-one.pull.reshape(-1), gradient)
        assert one.kl == pytest.approx(float(objective(at.reshape(-1))))
        hessian = torch.func.hessian(objective)(at.reshape(-1))
        operator = RouterCurvature([one], dense=1.0, diagonal=0.0)
        torch.testing.assert_close(as_matrix(operator), hessian)


def test_mean_hessian_and_gram():
    (domain,) = make_domains(1, tokens=25, bias=True)
    one = DomainCurvature(SOFTMAX, domain)
    x, targets = tokens_of(domain)
    hessians = torch.stack([autograd_hessian(SOFTMAX, z) for z in targets])
    torch.testing.assert_close(one.mean_hessian(), hessians.mean(0))
    trace = hessians.diagonal(dim1=1, dim2=2).sum(-1)
    torch.testing.assert_close(one.gram(), (x * trace[:, None]).T @ x / len(x))


def test_bad_domains_are_refused():
    (domain,) = make_domains(1)
    broken = [*domain.features[:-1], domain.features[-1] * float("nan")]
    for error, words, change in (
        (DataError, "'domain0' has no token", {"features": [torch.zeros(0, 5)]}),
        (DataError, "width 9", {"features": [torch.zeros(3, 9)]}),
        (DataError, "target logits", {"targets": [torch.zeros(3, 4)]}),
        (NumericalError, "'domain0': NaN", {"features": broken}),
    ):
        with pytest.raises(error, match=words):
            DomainCurvature(SOFTMAX, replace(domain, **change))
