from __future__ import annotations

import pytest
import torch

from moemerge.architectures.gates import BiasPlace, Gate, Score
from moemerge.errors import DataError
from moemerge.routing import MetricsAccumulator, measure, measure_routers
from routing.problems import GATES, autograd_hessian, make_domains, naive_divergence, tokens_of

GATE = Gate(Score.SOFTMAX, 2)


def test_a_case_counted_by_hand() -> None:
    target = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    model = torch.tensor([[2.0, 1.0, 3.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    accumulator = MetricsAccumulator(GATE)
    accumulator.update(target, model)
    result = accumulator.result()
    assert result.tokens == 2
    assert result.mismatch == pytest.approx(0.25)  # of {0,1} and {2,3}, only expert 1 is missed
    assert result.any_mismatch == pytest.approx(0.5)
    assert result.top1_agreement == pytest.approx(0.5)
    assert result.load_target == pytest.approx((0.25, 0.25, 0.25, 0.25))
    assert result.load == pytest.approx((0.25, 0.0, 0.5, 0.25))
    shift = ((1 + 1 + 4) / 14) ** 0.5
    assert result.logit_shift == pytest.approx(shift / 2)
    assert (result.shift_small, result.shift_moderate) == (0.5, 0.5)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_divergence_and_its_quadratic_model_equal_their_definition(gate: Gate) -> None:
    torch.manual_seed(0)
    target = torch.randn(9, 5, dtype=torch.float64)
    z = target + 0.1 * torch.randn(9, 5, dtype=torch.float64)
    accumulator = MetricsAccumulator(gate)
    accumulator.update(target, z)
    result = accumulator.result()
    pairs = list(zip(target, z, strict=True))
    exact = sum(float(naive_divergence(gate, t, v)) for t, v in pairs) / 9
    quadratic = (
        sum(float(0.5 * (v - t) @ autograd_hessian(gate, t) @ (v - t)) for t, v in pairs) / 9
    )
    assert result.kl == pytest.approx(exact)
    assert result.quadratic == pytest.approx(quadratic)
    assert result.quadratic == pytest.approx(result.kl, rel=0.1)


def test_blocks_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    target, z = torch.randn(100, 6), torch.randn(100, 6)
    whole, parts = MetricsAccumulator(GATE), MetricsAccumulator(GATE)
    whole.update(target, z)
    for begin, end in [(0, 1), (1, 1), (1, 60), (60, 100)]:
        parts.update(target[begin:end], z[begin:end])
    one, other = whole.result(), parts.result()
    assert one.tokens == other.tokens == 100
    assert one.kl == pytest.approx(other.kl)
    assert one.mismatch == pytest.approx(other.mismatch)
    assert one.load == pytest.approx(other.load)


def test_selection_biases_count_on_their_own_side() -> None:
    gate = Gate(Score.SIGMOID, 1, True, BiasPlace.SCORES)
    z = torch.tensor([[1.0, 0.0, 0.0]])
    away = torch.tensor([0.0, 0.0, 5.0])
    same = MetricsAccumulator(gate, bias=away, target_bias=away)
    same.update(z, z)
    assert (same.result().mismatch, same.result().load) == (0.0, (0.0, 0.0, 1.0))
    differ = MetricsAccumulator(gate, bias=away, target_bias=torch.zeros(3))
    differ.update(z, z)
    assert differ.result().mismatch == 1.0
    assert differ.result().kl == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("source_targets", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_measure_runs_both_routers_on_the_domain(bias: bool, source_targets: bool) -> None:
    (domain,) = make_domains(1, bias=bias, source_targets=source_targets)
    w = torch.randn_like(domain.router)
    x, targets = tokens_of(domain)
    accumulator = MetricsAccumulator(GATE)
    accumulator.update(targets, x @ w.T)
    expected, got = accumulator.result(), measure(GATE, domain, w)
    assert got.kl == pytest.approx(expected.kl)
    assert got.mismatch == pytest.approx(expected.mismatch)
    if not source_targets:
        own = measure(GATE, domain, domain.router)
        assert own.kl == pytest.approx(0.0, abs=1e-12)
        assert (own.mismatch, own.top1_agreement, own.logit_shift) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_several_routers_are_measured_as_each_alone(gate: Gate) -> None:
    (domain,) = make_domains(1, source_targets=True)
    routers = [torch.randn_like(domain.router) for _ in range(3)]
    together = measure_routers(gate, domain, routers)
    assert together == [measure(gate, domain, router) for router in routers]


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(DataError, match="no token"):
        MetricsAccumulator(GATE).result()
    with pytest.raises(DataError, match=r"\(1, 3\)"):
        MetricsAccumulator(GATE).update(torch.zeros(1, 4), torch.zeros(1, 3))
