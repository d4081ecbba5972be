"""The mathematics of a comparison, on numbers small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moemerge.architectures.gates import BiasPlace, Gate, Score
from moemerge.diagnosis.measure import (
    ChoiceComparison,
    RouterComparison,
    RouterView,
    dead_experts,
    divergences,
    load_entropy,
    overlap,
    overloaded_experts,
    relative_gap,
)
from moemerge.errors import DataError
from moemerge.routing.gates import divergence

SOFTMAX = Gate(Score.SOFTMAX, top_k=2)


def view(weight: Tensor, gate: Gate = SOFTMAX, **biases: Tensor) -> RouterView:
    return RouterView(gate, weight, biases.get("bias"), biases.get("selection_bias"))


def identity(gate: Gate = SOFTMAX, experts: int = 4) -> RouterView:
    """A router whose logits are its inputs."""
    return view(torch.eye(experts), gate)


def test_figures_of_two_tokens_by_hand() -> None:
    own = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    got = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    comparison = RouterComparison(identity(), identity())
    missed = comparison.add(own, got)
    assert missed.tolist() == [False, True]
    found = comparison.result()
    # The second token goes to experts 2, 3 instead of 0, 1: each loses half to each.
    assert (found.tokens, found.mismatch, found.any_mismatch) == (2, 0.5, 0.5)
    assert found.top1_agreement == 0.5
    assert found.weighted_overlap == pytest.approx(0.5)
    assert found.load_source == (0.5, 0.5, 0, 0)
    assert found.load == (0.25, 0.25, 0.25, 0.25)
    assert sorted(found.flow) == [(a, b, 0.125) for a in (0, 1) for b in (2, 3)]
    assert sum(share for *_, share in found.flow) == found.mismatch
    # KL(r ‖ p) of the second token: r and p are each other reversed.
    r = torch.softmax(own[1].double(), -1)
    kl = float((r * (r / r.flip(0)).log()).sum())
    assert found.kl == pytest.approx(kl / 2)
    assert found.drift == pytest.approx(math.sqrt(20) / math.sqrt(14) / 2)
    # On the model's features the two routers are one and the same.
    assert (found.kl_on_features, found.mismatch_on_features, found.quadratic) == (0, 0, 0)
    assert (found.logit_shift, found.shift_small, found.shift_moderate) == (0, 1, 1)


def test_on_the_same_features_only_the_routers_differ() -> None:
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    eye = torch.eye(4)
    comparison = RouterComparison(view(eye), view(1.15 * eye))
    comparison.add(x, x)
    found = comparison.result()
    assert found.logit_shift == pytest.approx(0.15)
    assert (found.shift_small, found.shift_moderate) == (0, 1)
    r, p = (torch.softmax(torch.tensor([s, 0, 0, 0]).double(), -1) for s in (1.0, 1.15))
    assert found.kl == found.kl_on_features == pytest.approx(float((r * (r / p).log()).sum()))
    assert found.quadratic == pytest.approx(0.5 * 0.15**2 * float(r[0] * (1 - r[0])), rel=1e-5)


def test_batches_add_up() -> None:
    torch.manual_seed(0)
    own, got = torch.randn(40, 6), torch.randn(40, 6)
    routers = (view(torch.randn(5, 6)), view(torch.randn(5, 6)))
    whole, parts = RouterComparison(*routers), RouterComparison(*routers)
    whole.add(own, got)
    for begin in range(0, 40, 13):
        parts.add(own[begin : begin + 13], got[begin : begin + 13])
    one, two = vars(whole.result()), vars(parts.result())
    for name in one.keys() - {"flow"}:
        assert two[name] == pytest.approx(one[name], rel=1e-6), name
    flows = [{(a, b): share for a, b, share in found["flow"]} for found in (one, two)]
    assert flows[1] == pytest.approx(flows[0], rel=1e-6)


def test_a_selection_bias_moves_the_choice_and_not_the_divergence() -> None:
    gate = Gate(Score.SIGMOID, top_k=1, selection_bias=BiasPlace.SCORES)
    x = torch.tensor([[2.0, 1.0]])
    eye, none = torch.eye(2), torch.zeros(2)
    comparison = RouterComparison(
        view(eye, gate, selection_bias=none),
        view(eye, gate, selection_bias=torch.tensor([0.0, 0.5])),
    )
    comparison.add(x, x)
    found = comparison.result()
    assert found.mismatch == 1
    assert found.kl == 0
    assert found.flow == ((0, 1, 1.0),)
    assert found.weighted_overlap == 0


def test_a_bias_on_the_logits_counts() -> None:
    x = torch.tensor([[1.0, 0.0]])
    gate = Gate(Score.SOFTMAX, top_k=1)
    other = view(torch.eye(2), gate, bias=torch.tensor([0.0, 3.0]))
    comparison = RouterComparison(view(torch.eye(2), gate), other)
    comparison.add(x, x)
    assert comparison.result().mismatch == 1


def test_models_that_choose_unlike_numbers_of_experts() -> None:
    few, many = Gate(Score.SOFTMAX, top_k=1), Gate(Score.SOFTMAX, top_k=2)
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    wider = RouterComparison(identity(few), identity(many))
    wider.add(x, x)
    assert wider.result().mismatch == 0
    narrower = RouterComparison(identity(many), identity(few))
    narrower.add(x, x)
    assert narrower.result().mismatch == 0.5
    assert narrower.result().flow == ()  # nobody took what was dropped


def test_the_overlap_is_one_less_half_the_distance_of_the_weights() -> None:
    z = torch.tensor([[2.0, 1.0, 0.0]])
    chosen = torch.tensor([[True, True, False]])
    other = torch.tensor([[True, False, True]])
    w = torch.softmax(torch.tensor([2.0, 1.0]), -1)[0]
    v = torch.softmax(torch.tensor([2.0, 0.0]), -1)[0]
    p = torch.softmax(z, -1)
    assert float(overlap((p, chosen), (p, other))) == pytest.approx(float(min(w, v)))
    assert float(overlap((p, chosen), (p, chosen))) == 1


@pytest.mark.parametrize(
    "gate",
    [
        SOFTMAX,
        Gate(Score.SIGMOID, top_k=2),
        Gate(Score.SIGMOID, top_k=2, normalised=False),
        Gate(Score.SQRT_SOFTPLUS, top_k=2),
        Gate(Score.SIGMOID, top_k=2, soft_cap=2.0),
    ],
    ids=["softmax", "sigmoid", "bernoulli", "softplus", "capped"],
)
def test_divergences_are_those_of_the_gate(gate: Gate) -> None:
    torch.manual_seed(1)
    wanted, moved, z = torch.randn(3, 7, 5, dtype=torch.float64)
    near = moved + 1e-4 * z
    found = divergences(gate, wanted, moved, near)
    torch.testing.assert_close(found.kl, divergence(gate, wanted, near))
    torch.testing.assert_close(found.on_features, divergence(gate, moved, near))
    torch.testing.assert_close(found.quadratic, found.on_features, rtol=2e-3, atol=0)


def test_the_mismatch_alone() -> None:
    own, got = torch.randn(9, 4), torch.randn(9, 4)
    both = RouterComparison(identity(), identity()), ChoiceComparison(identity(), identity())
    for comparison in both:
        comparison.add(own, got)
    assert float(both[1].missed) / 9 == pytest.approx(both[0].result().mismatch)  # type: ignore[arg-type]


def test_loads() -> None:
    even = (0.25, 0.25, 0.25, 0.25)
    assert load_entropy(even) == pytest.approx(1)
    assert load_entropy((1.0, 0.0, 0.0, 0.0)) == 0
    assert load_entropy((1.0,)) == 1
    # Expert 3 was never used by the source: its rest is not the merge's doing.
    assert dead_experts((0.5, 0.3, 0.2, 0.0), (0.9, 0.1, 0.0, 0.0)) == (2,)
    assert overloaded_experts((0.2, 0.3, 0.4, 0.1), (0.55, 0.3, 0.1, 0.05)) == (0,)
    assert overloaded_experts(even, even) == dead_experts(even, even) == ()


def test_gaps_of_nothing_are_nothing() -> None:
    zero = torch.zeros(1, 3)
    assert relative_gap(zero, zero).tolist() == [0.0]


def test_tokens_must_match() -> None:
    comparison = RouterComparison(identity(), identity())
    with pytest.raises(DataError, match="router inputs"):
        comparison.add(torch.zeros(2, 4), torch.zeros(3, 4))
    with pytest.raises(DataError, match="no token"):
        comparison.result()
