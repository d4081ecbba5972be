"""Fisher merging by hand, and where no information reaches a weight."""

from __future__ import annotations

import torch

from moemerge.architectures.roles import Role
from moemerge.merging.method import UnitStatistics


def known(values, tokens=100, domain=100, sequences=10):
    return UnitStatistics(torch.as_tensor(values), tokens, domain, sequences)


def test_by_hand(merge):
    models = [torch.tensor([[0.0, 1.0, 8.0]]), torch.tensor([[4.0, 3.0, 0.0]])]
    information = [known([[1.0, 2.0, 0.0]]), known([[3.0, 2.0, 1.0]])]
    merged = merge("fisher", models, statistics=information)
    torch.testing.assert_close(merged, torch.tensor([[3.0, 2.0, 0.0]]), atol=2e-5, rtol=0)
    merged = merge(
        "fisher", models, statistics=information, params=[{"weight": 0.75}, {"weight": 0.25}]
    )
    torch.testing.assert_close(merged, torch.tensor([[2.0, 1.5, 0.0]]), atol=1e-4, rtol=0)


def test_against_the_formula_in_float64(merge):
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(20, 30, generator=g) for _ in range(3)]
    values = [torch.randn(20, 30, generator=g) ** 2 * 1e-9 for _ in range(3)]
    weights = [0.5, 0.2, 0.3]
    merged = merge(
        "fisher",
        tensors,
        statistics=[known(v) for v in values],
        params=[{"weight": w} for w in weights],
    )
    floor = 1e-6 * sum(w * v.double().mean() for w, v in zip(weights, values, strict=True))
    terms = [w * v.double().clamp(min=floor) for w, v in zip(weights, values, strict=True)]
    expected = sum(f * t.double() for f, t in zip(terms, tensors, strict=True)) / sum(terms)
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-5)


def test_longer_sequences_do_not_count_more(merge):
    models = [torch.zeros(2, 2), torch.ones(2, 2)]
    ones = torch.ones(2, 2)
    information = [known(ones, domain=100, sequences=10), known(8 * ones, domain=800, sequences=10)]
    merged = merge("fisher", models, statistics=information)
    torch.testing.assert_close(merged, torch.full((2, 2), 0.5))
    merged = merge("fisher", models, statistics=information, normalize=False)
    torch.testing.assert_close(merged, torch.full((2, 2), 8 / 9))


def test_an_expert_that_one_model_never_used_is_the_others(merge):
    said = []
    models = [torch.zeros(2, 3), torch.ones(2, 3)]
    information = [known(torch.zeros(2, 3), tokens=0), known(torch.full((2, 3), 1e-12))]
    merged = merge(
        "fisher",
        models,
        statistics=information,
        role=Role.EXPERT,
        remark=lambda *r: said.append(r),
    )
    torch.testing.assert_close(merged, models[1], atol=1e-5, rtol=0)
    assert said == [("unvisited", {"m0": 0})]


def test_an_expert_that_no_model_used_is_averaged(merge):
    said = []
    models = [torch.zeros(2, 3), torch.ones(2, 3)]
    for values in (torch.zeros(2, 3), torch.full((2, 3), 1e-42)):
        merged = merge(
            "fisher",
            models,
            statistics=[known(values, tokens=0)] * 2,
            params=[{"weight": 1.0}, {"weight": 3.0}],
            remark=lambda *r: said.append(r),
        )
        torch.testing.assert_close(merged, torch.full((2, 3), 0.75))
    assert said == [("averaged", {"why": "no model's loss depends on it"})] * 2


def test_weights_without_information_are_averaged_by_the_floor(merge):
    models = [torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0])]
    information = [known([1.0, 0.0]), known([1.0, 0.0])]
    merged = merge("fisher", models, statistics=information)
    torch.testing.assert_close(merged, torch.tensor([0.5, 0.5]))
