"""Sums of products against their plain definitions."""

import pytest
import torch

from moemerge.forward.tokens import sort_by_expert
from moemerge.statistics.collecting import maths
from moemerge.statistics.collecting.maths import (
    TOKENS_PER_SUM,
    Routed,
    RoutedGradients,
    TokenSum,
    gram_sum,
)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def per_sequence(delta, x, counts):
    """Σ_s (Σ_t δ xᵀ)², one sequence at a time, float64."""
    total = torch.zeros(delta.shape[1], x.shape[1], dtype=torch.float64)
    start = 0
    for count in counts:
        own = slice(start, start + count)
        total += (delta[own].double().T @ x[own].double()).square()
        start += count
    return total


def test_gram_of_half_precision_features_is_summed_in_full():
    x = random(5 * TOKENS_PER_SUM + 7, 12).bfloat16()
    exact = x.double().T @ x.double()
    assert float((gram_sum(x) - exact).abs().max() / exact.abs().max()) < 2e-6


def test_a_moment_is_a_mean_over_all_that_came():
    x, moment = random(70, 5), TokenSum(gram_sum)
    assert moment.mean() is None
    for part in (x[:13], x[13:13], x[13:]):
        moment.add(part)
    assert moment.tokens == 70
    mean = moment.mean()
    assert mean is not None
    torch.testing.assert_close(mean, x.T @ x / 70)


@pytest.mark.parametrize("budget", [1, 4 * 6 * 4, 4 * 6 * 4 * 3, 2**20])
def test_squares_of_single_sequences(budget, monkeypatch):
    """Whatever fits into the budget: rows of one sequence, one sequence, some, all."""
    monkeypatch.setitem(maths.BUDGET, "cpu", budget)
    delta, x = random(5, 7, 6), random(5, 7, 4, seed=1)
    total = maths.new_total((6, 4), torch.device("cpu"))
    maths.add_squares(total, delta.clone(), x)
    wanted = per_sequence(delta.flatten(0, 1), x.flatten(0, 1), [7] * 5)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 4 * 6 * 4 * 2, 2**20])
def test_squares_of_sequences_of_unlike_length(budget, monkeypatch):
    monkeypatch.setitem(maths.BUDGET, "cpu", budget)
    counts = [3, 0, 11, 1, 8, 9]
    delta, x = random(sum(counts), 6), random(sum(counts), 4, seed=1)
    total = maths.new_total((6, 4), torch.device("cpu"))
    maths.add_ragged_squares(total, delta, x, counts)
    torch.testing.assert_close(total, per_sequence(delta, x, counts), rtol=1e-5, atol=1e-5)


CHOSEN = torch.tensor([[0, 2], [2, 1], [5, 0], [2, 5]])  # of 4 experts: 5 is nobody


def test_tokens_are_sorted_by_expert_in_their_order():
    order, bounds = sort_by_expert(CHOSEN, 4)
    found = [(order[bounds[e] : bounds[e + 1]] // 2).tolist() for e in range(4)]
    assert found == [[0, 2], [1], [0, 1, 3], []]


def test_routed_inputs_come_by_expert():
    x = random(4, 3)
    routed = Routed(4)
    routed.add(x[:1], CHOSEN[:1])
    routed.add(x[1:], CHOSEN[1:])
    found = dict(routed.by_expert())
    assert torch.equal(found[2], x[[0, 1, 3]])
    assert found[3].shape == (0, 3)


def test_routed_gradients_carry_the_routing_weight():
    x, gradient = random(4, 3), random(4, 3, seed=1)
    weights = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7], [0.4, 0.6]])
    routed = RoutedGradients(4)
    routed.add(x[:3], CHOSEN[:3], weights[:3], gradient[:3], lengths=[1, 2])
    routed.add(x[3:], CHOSEN[3:], weights[3:], gradient[3:], lengths=[1])
    found = {expert: rest for expert, *rest in routed.by_expert()}
    inputs, own, counts = found[2]
    assert torch.equal(inputs, x[[0, 1, 3]])
    torch.testing.assert_close(own, gradient[[0, 1, 3]] * torch.tensor([[0.9], [0.2], [0.4]]))
    assert counts == [1, 1, 1]
    assert found[3][2] == [0, 0, 0]
