"""The figures on numbers small enough to work out by hand, and against their definitions."""

import copy
import math
import pickle
import re
from pathlib import Path

import pytest
import torch

from moemerge.errors import DataError
from moemerge.families.rules import BiasPlace, Gate, Score
from moemerge.routing import Measured, figures, measure_routers
from moemerge.routing.figures import (
    FIGURES,
    Choices,
    RouterOutput,
    Tokens,
    dead,
    load_entropy,
    overloaded,
    relative_gap,
    total_figures,
    weighted_overlap,
)
from moemerge.routing.measure import CALIBRATION_FIGURES, FigureSums, RouterView, compare
from routing.problems import GATES, autograd_hessian, make_domains, naive_divergence, tokens_of

SOFTMAX = Gate(Score.SOFTMAX, top_k=2)


def view(weight, gate=SOFTMAX, **biases):
    return RouterView(gate, weight, biases.get("bias"), biases.get("selection_bias"))


def identity(gate=SOFTMAX, experts=4):
    """A router whose logits are its inputs."""
    return view(torch.eye(experts), gate)


def measured(*blocks, names=tuple(FIGURES)):
    sums = FigureSums(names)
    for block in blocks:
        sums.add(block)
    return sums.result()


def test_figures_of_two_tokens_by_hand():
    own = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    got = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    tokens = compare(identity(), identity(), own, got)
    assert tokens.lost.any(dim=-1).tolist() == [False, True]
    found = measured(tokens)
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


def test_the_figure_of_the_page_is_measured_like_the_others():
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(@of_tokens.*?)^```", page, re.M | re.S)
    own = torch.tensor([[3.0, 2.0, 1.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    tokens = compare(identity(), identity(), own, own)
    try:
        exec(block, dict(vars(figures)))
        found = measured(tokens, names=tuple(FIGURES))
        highest = own.double().softmax(dim=-1).max(dim=-1).values
        assert found.sharpness == pytest.approx(float(highest.mean()), rel=1e-6)
        assert total_figures([found, found])["sharpness"] == pytest.approx(found.sharpness)
    finally:
        FIGURES.pop("sharpness", None)


def test_on_the_same_features_only_the_routers_differ():
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    eye = torch.eye(4)
    found = measured(compare(view(eye), view(1.15 * eye), x, x))
    assert found.logit_shift == pytest.approx(0.15)
    assert (found.shift_small, found.shift_moderate) == (0, 1)
    r, p = (torch.softmax(torch.tensor([s, 0, 0, 0]).double(), -1) for s in (1.0, 1.15))
    assert found.kl == found.kl_on_features == pytest.approx(float((r * (r / p).log()).sum()))
    assert found.quadratic == pytest.approx(0.5 * 0.15**2 * float(r[0] * (1 - r[0])), rel=1e-5)


def test_batches_add_up():
    torch.manual_seed(0)
    own, got = torch.randn(40, 6), torch.randn(40, 6)
    routers = (view(torch.randn(5, 6)), view(torch.randn(5, 6)))
    blocks = [compare(*routers, own[i : i + 13], got[i : i + 13]) for i in range(0, 40, 13)]
    whole, parts = measured(compare(*routers, own, got)), measured(*blocks)
    assert (whole.tokens, whole.top_k) == (parts.tokens, parts.top_k) == (40, 2)
    one, two = whole.figures, parts.figures
    for name in one.keys() - {"flow"}:
        assert two[name] == pytest.approx(one[name], rel=1e-6), name
    flows = [{(a, b): share for a, b, share in found["flow"]} for found in (one, two)]
    assert flows[1] == pytest.approx(flows[0], rel=1e-6)


def test_a_selection_bias_moves_the_choice_and_not_the_divergence():
    gate = Gate(Score.SIGMOID, top_k=1, selection_bias=BiasPlace.SCORES)
    x = torch.tensor([[2.0, 1.0]])
    eye, none = torch.eye(2), torch.zeros(2)
    moved = view(eye, gate, selection_bias=torch.tensor([0.0, 0.5]))
    found = measured(compare(view(eye, gate, selection_bias=none), moved, x, x))
    assert found.mismatch == 1
    assert found.kl == 0
    assert found.flow == ((0, 1, 1.0),)
    assert found.weighted_overlap == 0


def test_models_that_choose_unlike_numbers_of_experts():
    few, many = Gate(Score.SOFTMAX, top_k=1), Gate(Score.SOFTMAX, top_k=2)
    x = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    assert measured(compare(identity(few), identity(many), x, x)).mismatch == 0
    narrower = measured(compare(identity(many), identity(few), x, x))
    assert narrower.mismatch == 0.5
    assert narrower.flow == ()  # nobody took what was dropped


def test_the_overlap_is_the_weight_that_both_give_an_expert():
    gate = Gate(Score.SOFTMAX, top_k=2, selection_bias=BiasPlace.LOGITS)
    z = torch.tensor([[2.0, 1.0, 0.0]])
    source = RouterOutput(gate, z, torch.zeros(3))  # experts 0 and 1
    model = RouterOutput(gate, z, torch.tensor([0.0, -5.0, 0.0]))  # experts 0 and 2
    w = torch.softmax(torch.tensor([2.0, 1.0]), -1)[0]
    v = torch.softmax(torch.tensor([2.0, 0.0]), -1)[0]
    overlap = weighted_overlap(Tokens(source, model, source))
    assert float(overlap) == pytest.approx(float(min(w, v)))
    assert float(weighted_overlap(Tokens(source, source, source))) == 1


def test_only_what_is_asked_for_is_computed():
    own, got = torch.randn(9, 4), torch.randn(9, 4)
    tokens = compare(identity(), identity(), own, got)
    alone = measured(tokens, names=["mismatch"])
    assert alone.figures == {"mismatch": measured(tokens).mismatch}


def test_loads():
    even = (0.25, 0.25, 0.25, 0.25)
    assert load_entropy(even) == pytest.approx(1)
    assert load_entropy((1.0, 0.0, 0.0, 0.0)) == 0
    assert load_entropy((1.0,)) == 1
    # Expert 3 was never used by the source: its rest is not the merge's doing.
    assert dead(Choices((0.5, 0.3, 0.2, 0.0), (0.9, 0.1, 0.0, 0.0), ())) == (2,)
    assert overloaded(Choices((0.2, 0.3, 0.4, 0.1), (0.55, 0.3, 0.1, 0.05), ())) == (0,)
    assert overloaded(Choices(even, even, ())) == dead(Choices(even, even, ())) == ()
    # Where the lines are: 1/20 and 1/4 of an even load, twice an even one, twice the source's.
    for was, now, found in ((0.0625, 0.0124, (0,)), (0.0625, 0.0126, ()), (0.0624, 0.0, ())):
        assert dead(Choices((was, 0.5, 0.3, 0.2), (now, 0.5, 0.3, 0.2), ())) == found
    for was, now, found in ((0.1, 0.5, (0,)), (0.1, 0.49, ()), (0.3, 0.6, (0,)), (0.3, 0.59, ())):
        assert overloaded(Choices((was, 0.5, 0.3, 0.2), (now, 0.3, 0.1, 0.1), ())) == found


def test_gaps_of_nothing_are_nothing():
    zero = torch.zeros(1, 3)
    assert relative_gap(zero, zero).tolist() == [0.0]


def test_nothing_to_measure_is_refused():
    with pytest.raises(DataError, match="router inputs"):
        compare(identity(), identity(), torch.zeros(2, 4), torch.zeros(3, 4))
    with pytest.raises(DataError, match="no token"):
        FigureSums().result()


# --- figures as attributes, totals --------------------------------------------------------------


def test_figures_are_attributes():
    x = torch.randn(5, 4)
    one = measured(compare(identity(), identity(), x, x))
    assert one.kl == one.figures["kl"] == 0
    assert {"kl", "flow", "tokens"} <= set(dir(one))
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError, match="no figure 'k1'"):
        _ = one.k1


def test_a_total_is_the_mean_over_routers_or_the_sum_or_what_was_measured():
    values = {name: 0.0 for name, figure in FIGURES.items() if figure.of_tokens}
    rows = [
        Measured(tokens=10, choices=10 * k, figures={**values, "mismatch": m, "any_mismatch": m})
        for k, m in ((2, 0.5), (4, 0.25))
    ]
    total = total_figures(rows, any_mismatch=0.6, loss=1.5)
    assert (total["mismatch"], total["any_mismatch"], total["loss"]) == (0.375, 0.6, 1.5)
    assert (total["mismatched_per_token"], total["choices_per_token"]) == (2.0, 6)
    assert total["mismatched_layers_per_token"] == 0.75
    assert "loss_source" not in total
    assert "load" not in total


# --- a calibration's measurement ----------------------------------------------------------------


def agreement_of(gate, target, model):
    wanted = RouterOutput(gate, target)
    return measured(
        Tokens(wanted, RouterOutput(gate, model), moved=wanted), names=CALIBRATION_FIGURES
    )


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_divergence_and_its_quadratic_model_equal_their_definition(gate):
    torch.manual_seed(0)
    target = torch.randn(9, 5, dtype=torch.float64)
    z = target + 0.1 * torch.randn(9, 5, dtype=torch.float64)
    result = agreement_of(gate, target, z)
    pairs = list(zip(target, z, strict=True))
    exact = sum(float(naive_divergence(gate, t, v)) for t, v in pairs) / 9
    second = sum(float(0.5 * (v - t) @ autograd_hessian(gate, t) @ (v - t)) for t, v in pairs) / 9
    assert result.kl == pytest.approx(exact)
    assert result.quadratic == pytest.approx(second)
    assert result.quadratic == pytest.approx(result.kl, rel=0.1)


@pytest.mark.parametrize("source_targets", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_routers_are_measured_on_the_domain(bias, source_targets):
    (domain,) = make_domains(1, bias=bias, source_targets=source_targets)
    w = torch.randn_like(domain.router)
    x, targets = tokens_of(domain)
    expected = agreement_of(SOFTMAX, targets, x @ w.T)
    got, own = measure_routers(SOFTMAX, domain, [w, domain.router])
    assert got.tokens == domain.tokens
    assert got.figures == pytest.approx(expected.figures)
    if not source_targets:
        assert own.kl == pytest.approx(0.0, abs=1e-12)
        assert (own.mismatch, own.top1_agreement) == (0.0, 1.0)


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_several_routers_are_measured_as_each_alone(gate):
    (domain,) = make_domains(1, source_targets=True)
    routers = [torch.randn_like(domain.router) for _ in range(3)]
    together = measure_routers(gate, domain, routers)
    assert together == [measure_routers(gate, domain, [router])[0] for router in routers]
