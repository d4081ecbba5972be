"""The same solve on a GPU: bf16 features through the kernels, others through plain torch."""

from dataclasses import replace

import pytest
import torch

from moemerge.routing import Curvature, measure_routers, minimise_divergence, solve
from moemerge.routing.products import FusedFeatures, features_of
from moemerge.routing.solve import PRECONDITIONERS, system
from routing.problems import GATES, make_domains

pytestmark = pytest.mark.gpu
SOFTMAX = GATES["softmax"]


def on_gpu(domain):
    return replace(
        domain,
        features=[x.cuda() for x in domain.features],
        router=domain.router.cuda(),
        targets=None if domain.targets is None else [t.cuda() for t in domain.targets],
    )


def problem(dtype=torch.bfloat16, **options):
    shape = {"experts": 16, "width": 64, "tokens": 5000, "dtype": dtype, "move": 0.2}
    domains = make_domains(2, **(shape | options))
    return [replace(d, router=0.2 * d.router.double()) for d in domains]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("curvature", list(Curvature))
@pytest.mark.parametrize("bias", [False, True])
def test_operator_and_right_hand_side(gate, curvature, bias):
    domains = problem(bias=bias, source_targets=bias)
    cpu = system(gate, domains, curvature=curvature)
    gpu = system(gate, [on_gpu(d) for d in domains], curvature=curvature)
    assert isinstance(features_of(gpu.curvatures[0].parts[0][0], 64), FusedFeatures)
    v = torch.randn(cpu.shape, dtype=torch.float64)
    exact = cpu.accurate().mv(v)

    def error(got, want):
        return float((got.cpu() - want).norm() / want.norm())

    assert error(gpu.accurate().mv(v.cuda()), exact) < 5e-7
    seen = gpu.representable(v.cuda())
    assert error(gpu.mv(seen), cpu.accurate().mv(seen.cpu())) < 1e-5
    assert error(gpu.rhs(), cpu.rhs()) < 5e-7
    assert error(gpu.diagonal(), cpu.diagonal()) < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", PRECONDITIONERS)
def test_solution_does_not_depend_on_the_device(kind, dtype):
    domains = problem(dtype)
    start = torch.stack([d.router for d in domains]).mean(dim=0) * 0.5
    cpu = solve(SOFTMAX, domains, start, preconditioner=kind, rtol=1e-9)
    gpu = solve(SOFTMAX, [on_gpu(d) for d in domains], start.cuda(), preconditioner=kind)
    assert gpu.converged, gpu.message
    truth = system(SOFTMAX, domains).accurate()
    b = truth.rhs()
    assert float((b - truth.mv(gpu.weight.cpu())).norm() / b.norm()) < 1.5e-6
    move = (cpu.weight - start).norm()
    assert float((cpu.weight - gpu.weight.cpu()).norm() / move) < 1e-4


def test_metrics_and_the_exact_objective():
    domains = problem()
    start = torch.stack([d.router for d in domains]).mean(dim=0)
    there = [on_gpu(d) for d in domains]
    for a, b in zip(domains, there, strict=True):
        one = measure_routers(SOFTMAX, a, [start, a.router])
        two = measure_routers(SOFTMAX, b, [start, b.router])
        for x, y in zip(one, two, strict=True):
            assert y.kl == pytest.approx(x.kl, rel=1e-4, abs=1e-9)
            assert y.mismatch == pytest.approx(x.mismatch, abs=1e-3)
    cpu = minimise_divergence(SOFTMAX, domains, start)
    gpu = minimise_divergence(SOFTMAX, there, start.cuda())
    assert gpu.converged
    assert gpu.kl[-1] == pytest.approx(cpu.kl[-1], rel=1e-3)


@pytest.mark.parametrize("bias", [False, True])
def test_gram_matrices(bias):
    (domain,) = make_domains(1, experts=8, width=64, tokens=3000, dtype=torch.bfloat16, bias=bias)
    x, t = torch.cat(list(domain.features)), torch.rand(domain.tokens)
    wide = torch.cat([x, x.new_ones(len(x), 1)], dim=1).double() if bias else x.double()
    features = features_of(x.cuda(), 64 + bias)
    assert isinstance(features, FusedFeatures)
    want = wide.T @ (wide * t.double()[:, None])
    got = features.gram(t.cuda()).cpu().double()
    assert float((got - want).norm() / want.norm()) < 1e-3
