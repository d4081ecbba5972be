import pytest
import torch

from moemerge.errors import ArchitectureError
from moemerge.families.rules import BiasPlace, Gate, Score
from moemerge.routing.gates import (
    divergence,
    divergence_gradient,
    is_bernoulli,
    log_probabilities,
    probabilities,
    select,
    slope,
)
from routing.problems import GATES, naive_divergence, naive_scores

SCORES = BiasPlace.SCORES

each_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


def logits(tokens=20, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(tokens, 6, generator=generator, dtype=torch.float64)


def test_masked_score_zero_lets_a_negative_bias_lose_to_another_group():
    gate = Gate(Score.SIGMOID, 2, True, SCORES, 2, 1, group_score="top2_sum", masked_score=0.0)
    bias = torch.tensor([0.0, -2.0, -3.0, -3.0])
    assert sorted(select(gate, torch.zeros(1, 4), bias)[0].tolist())[0] == 0
    assert 1 not in select(gate, torch.zeros(1, 4), bias)[0].tolist()


def test_saturated_sigmoids_are_still_told_apart():
    gate = Gate(Score.SIGMOID, 1, normalised=False)
    assert select(gate, torch.tensor([[60.0, 80.0, 70.0]])).item() == 1


def test_a_missing_or_surplus_bias_is_refused():
    with pytest.raises(ArchitectureError, match="given no selection bias"):
        select(Gate(Score.SIGMOID, 1, True, SCORES), torch.zeros(1, 4))
    with pytest.raises(ArchitectureError, match="but has none"):
        select(Gate(Score.SIGMOID, 1), torch.zeros(1, 4), torch.zeros(4))


def test_impossible_groups_are_refused():
    with pytest.raises(ArchitectureError, match="12 experts"):
        select(Gate(Score.SOFTMAX, 1, groups=5), torch.zeros(1, 12))
    with pytest.raises(ArchitectureError, match="median"):
        select(Gate(Score.SOFTMAX, 1, groups=4, group_score="median"), torch.zeros(1, 12))


# --- mathematics ---------------------------------------------------------------------------------


@each_gate
def test_probabilities_and_divergence_equal_their_definition(gate):
    z, target = logits(seed=1), logits(seed=2)
    f = naive_scores(gate, z)
    expected = f if is_bernoulli(gate) else f / f.sum(-1, keepdim=True)
    torch.testing.assert_close(probabilities(gate, z), expected)
    torch.testing.assert_close(divergence(gate, target, z), naive_divergence(gate, target, z))
    assert float(divergence(gate, z, z).abs().max()) < 1e-14
    assert float(divergence(gate, target, z).min()) > 0


@each_gate
def test_slope_is_the_derivative_of_the_log_score(gate):
    z = logits().requires_grad_()
    (expected,) = torch.autograd.grad(naive_scores(gate, z).log().sum(), z)
    got = slope(gate, z.detach())
    torch.testing.assert_close(torch.ones_like(z) if got is None else got, expected)


@each_gate
def test_gradient_equals_autograd(gate):
    z, target = logits(seed=1).requires_grad_(), logits(seed=2)
    (expected,) = torch.autograd.grad(naive_divergence(gate, target, z).sum(), z)
    torch.testing.assert_close(divergence_gradient(gate, target, z.detach()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_gate
def test_extreme_logits_stay_finite(gate, dtype):
    z = torch.tensor([[300.0, -300.0, 0.0, 40.0, -40.0, 1.0]], dtype=dtype)
    other = z.flip(-1)
    assert torch.isfinite(log_probabilities(gate, z)).all()
    assert torch.isfinite(divergence(gate, z, other)).all()
    assert torch.isfinite(divergence_gradient(gate, z, other)).all()
    got = slope(gate, z)
    assert got is None or torch.isfinite(got).all()


def test_sqrt_softplus_tail_is_smooth():
    gate = GATES["sqrt softplus"]
    z = torch.tensor([[-18.0 - 1e-9, -18.0 + 1e-9]], dtype=torch.float64)
    left, right = log_probabilities(gate, z)[0].tolist()
    assert right - left == pytest.approx(1e-9, rel=1e-4)
