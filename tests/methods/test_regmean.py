"""RegMean against its own least-squares problem, solved directly in float64."""

import pytest
import torch

from moemerge.errors import ConfigError, NumericalError
from moemerge.families.roles import Role
from moemerge.methods import regmean as module
from moemerge.methods.method import UnitStatistics


def inputs_of(tokens, width, seed):
    """Correlated inputs, (tokens, width)."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=g, dtype=torch.float64)
    return torch.randn(tokens, width, generator=g, dtype=torch.float64) @ mix


def statistics(x, domain=None):
    gram = (x.T @ x / max(1, len(x))).float()
    return UnitStatistics(gram, len(x), domain or max(1, len(x)), 4)


def weights_of(count, out, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(out, width, generator=g) for _ in range(count)]


def direct(weights, grams, factor):
    """(Σ G̃)⁻¹ Σ G̃ Wᵀ, term by term."""
    damped = [factor * g + (1 - factor) * torch.diag(g.diagonal()) for g in grams]
    right = sum(g @ w.double().T for g, w in zip(damped, weights, strict=True))
    return torch.linalg.solve(sum(damped), right).T


def error(merged, weights, xs, shares=None):
    shares = shares or [1.0] * len(xs)
    return sum(
        s * ((merged.double() - w.double()) @ x.T).square().sum()
        for s, w, x in zip(shares, weights, xs, strict=True)
    )


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("counts", [(50, 50), (40, 200), (30, 60, 90)])
def test_is_the_direct_solution(merge, factor, normalize, counts):
    width = 7
    xs = [inputs_of(n, width, i) for i, n in enumerate(counts)]
    weights = weights_of(len(counts), 5, width)
    domains = [2 * n + 10 for n in counts]  # an expert sees only some of a model's tokens
    merged = merge(
        "regmean",
        weights,
        statistics=[statistics(x, n) for x, n in zip(xs, domains, strict=True)],
        role=Role.EXPERT,
        factor=factor,
        normalize=normalize,
    )
    scales = [1 / n if normalize else 1.0 for n in domains]
    grams = [s * (x.T @ x) for s, x in zip(scales, xs, strict=True)]
    torch.testing.assert_close(
        merged.double(), direct(weights, grams, factor), rtol=1e-4, atol=1e-5
    )


def test_by_hand(merge):
    """Two models that see one feature each: each feature is answered by the model that sees it."""
    first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 6.0]])
    sees = [torch.diag(torch.tensor(d)) for d in ([1.0, 0.0], [0.0, 1.0])]
    known = [UnitStatistics(g, 100, 100, 1) for g in sees]
    merged = merge("regmean", [first, second], statistics=known)
    assert merged.tolist() == [[1.0, 6.0]]
    # a feature that both see, one three times as strongly: 3/4 and 1/4
    known = [UnitStatistics(torch.diag(torch.tensor([3.0, d])), 100, 100, 1) for d in (3.0, 1.0)]
    merged = merge("regmean", [first, second], statistics=known)
    torch.testing.assert_close(merged, torch.tensor([[3.0, 3.0]]))


def test_weights_scale_the_models_errors(merge):
    xs = [inputs_of(60, 6, i) for i in range(2)]
    weights = weights_of(2, 4, 6)
    params = [{"weight": 0.25}, {"weight": 0.75}]
    known = [statistics(x) for x in xs]
    merged = merge("regmean", weights, params=params, statistics=known)
    grams = [p["weight"] * x.T @ x / 60 for p, x in zip(params, xs, strict=True)]
    torch.testing.assert_close(merged.double(), direct(weights, grams, 0.9), rtol=1e-4, atol=1e-5)
    alone = merge("regmean", weights, params=[{"weight": 0.0}, {"weight": 2.0}], statistics=known)
    torch.testing.assert_close(alone, weights[1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="sum to 0"):
        merge("regmean", weights, params={"weight": 0.0}, statistics=known)


def test_an_expert_nobody_visited_is_averaged_and_said(merge):
    said = []
    weights = weights_of(3, 4, 6)
    known = [statistics(inputs_of(0, 6, 0), 50)] * 3
    merged = merge(
        "regmean", weights, statistics=known, role=Role.EXPERT, remark=lambda *r: said.append(r)
    )
    torch.testing.assert_close(merged, sum(weights) / 3)
    assert said == [("few_tokens", {"m0": 0, "m1": 0, "m2": 0})]


def test_an_expert_one_model_visits_is_mostly_that_models(merge):
    said = []
    weights = weights_of(2, 4, 6)
    x = inputs_of(800, 6, 1)
    known = [statistics(x, 1000), statistics(x[:0], 1000)]
    merged = merge(
        "regmean", weights, statistics=known, role=Role.EXPERT, remark=lambda *r: said.append(r)
    )
    # 16 tokens are made up for both: the other's share is half of 16 among 800 / 2 + 16
    share = 8 / (400 + 16)
    expected = (1 - share) * weights[0] + share * weights[1]
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert said == [("few_tokens", {"m0": 800, "m1": 0})]
    none = merge("regmean", weights, statistics=known, role=Role.EXPERT, min_tokens=0)
    torch.testing.assert_close(none, weights[0], rtol=1e-4, atol=1e-5)


def test_jitter_is_used_where_inputs_span_too_little_and_said(merge):
    """Fewer tokens than features, factor 1: directions nobody saw are averaged."""
    said = []
    x = inputs_of(20, 40, 3)
    known = [statistics(x[:10], 10), statistics(x[10:], 10)]
    weights = weights_of(2, 3, 40)
    options = {"factor": 1.0, "min_tokens": 0, "remark": lambda *r: said.append(r)}
    merged = merge("regmean", weights, statistics=known, **options)
    assert [kind for kind, _ in said] == ["jitter"]
    assert 1e-5 <= said[0][1]["jitter"] <= 1e-3
    average = sum(weights) / 2
    size = x.square().mean(0).sqrt().float()  # the pull is measured in units of each feature
    unseen = torch.linalg.svd(x.float() / size).Vh[20:]
    change = (merged - average) * size
    assert (change @ unseen.T).abs().max() < 0.1 * change.abs().max()
    assert error(merged, weights, [x[:10], x[10:]]) < 1e-3 * error(
        average, weights, [x[:10], x[10:]]
    )


def test_everything_without_a_gram_is_averaged(merge):
    said = []
    pair = [torch.tensor([1.0, 3.0]), torch.tensor([3.0, 5.0])]
    merged = merge("regmean", pair, role=Role.NORM, remark=lambda *r: said.append(r))
    assert merged.tolist() == [2.0, 4.0]
    assert said == []
    weights = weights_of(2, 4, 6)
    known = [statistics(inputs_of(50, 6, 0)), None]
    merged = merge("regmean", weights, statistics=known, remark=lambda *r: said.append(r))
    torch.testing.assert_close(merged, sum(weights) / 2)
    assert said == [("averaged", {"why": "no statistics of m1"})]


def test_rows_in_chunks_equal_the_whole(merge, monkeypatch):
    weights = weights_of(2, 50, 6)
    known = [statistics(inputs_of(50, 6, i)) for i in range(2)]
    whole = merge("regmean", weights, statistics=known)
    monkeypatch.setattr(module, "SOLVE_ELEMENTS", 40)
    torch.testing.assert_close(merge("regmean", weights, statistics=known), whole)


def test_a_matrix_that_is_no_gram_is_refused(merge):
    known = [UnitStatistics(torch.tensor([[1.0, 5.0], [5.0, 1.0]]), 50, 50, 1)] * 2
    with pytest.raises(NumericalError, match="no positive semidefinite matrix"):
        merge("regmean", weights_of(2, 3, 2), statistics=known)


def diagonal(*values, tokens=100):
    return UnitStatistics(torch.diag(torch.tensor(values)), tokens, 100, 1)


def test_anchors_by_hand(merge):
    """One feature that both see, one three times as strongly, and one that nobody sees."""
    models, base = [torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 6.0]])], [[10.0, 20.0]]
    known = [diagonal(3.0, 0.0), diagonal(1.0, 0.0)]
    anchored = merge("regmean", models, base=base, statistics=known, anchor="base")
    assert anchored.tolist() == [[2.0, 20.0]]
    average = merge("regmean", models, base=base, statistics=known)
    assert average.tolist() == [[2.0, 4.0]]


def test_few_tokens_draw_to_the_base_by_hand(merge):
    """8 of 16 tokens each: half of the way from the average 3 to the base 10; none: all of it."""
    said = []
    models, base = [torch.tensor([[1.0]]), torch.tensor([[5.0]])], [[10.0]]
    options = {"base": base, "anchor": "base", "remark": lambda *r: said.append(r)}
    known = [diagonal(1.0, tokens=8)] * 2
    torch.testing.assert_close(
        merge("regmean", models, statistics=known, **options), torch.tensor([[6.5]])
    )
    known = [diagonal(0.0, tokens=0)] * 2
    assert merge("regmean", models, statistics=known, **options).tolist() == base
    assert said == [("near_base", {"m0": 8, "m1": 8}), ("near_base", {"m0": 0, "m1": 0})]


@pytest.mark.parametrize("normalize", [True, False])
def test_lot_is_regmean_from_the_base_on(merge, normalize):
    base, *weights = weights_of(3, 5, 7)
    xs = [inputs_of(n, 7, i) for i, n in enumerate((40, 90))]
    for x in xs:
        x[:, 3] = 0
    known = [statistics(x, 100) for x in xs]
    given = {"base": base, "statistics": known, "normalize": normalize}
    anchored = merge("regmean", weights, anchor="base", factor=1.0, min_tokens=0, **given)
    torch.testing.assert_close(anchored, merge("lot", weights, **given), rtol=1e-5, atol=1e-6)
    assert torch.equal(anchored[:, 3], base[:, 3])
