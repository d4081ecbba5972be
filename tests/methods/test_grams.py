"""lot, slta and cat against the problems they state; Fisher merging by hand."""

import pytest
import torch

from moemerge.families.roles import Role
from moemerge.methods.method import UnitStatistics

OUT, WIDTH = 5, 7


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def texts(counts, width=WIDTH, seed=0):
    """Correlated inputs of each model, (tokens, width)."""
    return [
        normal(n, width, seed=seed + i) @ normal(width, width, seed=50 + i)
        for i, n in enumerate(counts)
    ]


def statistics(xs):
    return [UnitStatistics(x.T @ x / len(x), len(x), 2 * len(x) + 10, 4) for x in xs]


def shares_of(xs):
    """Each model's tokens through the unit count by its text's length."""
    return [1 / (2 * len(x) + 10) for x in xs]


@pytest.mark.parametrize("counts", [(60, 60), (40, 200), (30, 60, 90)])
def test_lot_is_least_squares_for_task_vectors(merge, counts):
    base, xs = normal(OUT, WIDTH, seed=9), texts(counts)
    vectors = [normal(OUT, WIDTH, seed=20 + i) for i in range(len(xs))]
    weights = [1.0 + i for i in range(len(xs))]
    merged = merge(
        "lot", [base + t for t in vectors], base=base, statistics=statistics(xs),
        role=Role.EXPERT, params=[{"weight": w} for w in weights], **{"lambda": 0.7},
    )  # fmt: skip
    shares = [w * s for w, s in zip(weights, shares_of(xs), strict=True)]
    rows = torch.cat([s**0.5 * x for s, x in zip(shares, xs, strict=True)])
    answers = torch.cat([s**0.5 * x @ t.T for s, x, t in zip(shares, xs, vectors, strict=True)])
    expected = 0.7 * torch.linalg.lstsq(rows, answers).solution.T
    torch.testing.assert_close(merged - base, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("counts", [(60, 60), (40, 200), (30, 60, 90)])
def test_slta_is_least_squares_for_the_coefficients(merge, counts):
    base, xs = normal(OUT, WIDTH, seed=9), texts(counts)
    vectors = [normal(OUT, WIDTH, seed=20 + i) for i in range(len(xs))]
    columns, targets = [], []
    for s, x, t in zip(shares_of(xs), xs, vectors, strict=True):
        columns.append(torch.stack([s**0.5 * (x @ v.T).flatten() for v in vectors], dim=1))
        targets.append(s**0.5 * (x @ t.T).flatten())
    a = torch.linalg.lstsq(torch.cat(columns), torch.cat(targets)[:, None]).solution.flatten()
    merged = merge(
        "slta", [base + t for t in vectors], base=base, statistics=statistics(xs), ridge=0.0
    )
    expected = base + sum(c * t for c, t in zip(a, vectors, strict=True))
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-8)


def test_slta_of_equal_models_shares_equally(merge):
    base, tau = normal(OUT, WIDTH, seed=9), normal(OUT, WIDTH, seed=1)
    merged = merge("slta", [base + tau] * 2, base=base, statistics=statistics(texts((30, 30))))
    torch.testing.assert_close(merged, base + tau)


def test_cat_by_hand(merge):
    # Model 0's inputs lie along e_0, model 1's along e_1. Model 1 answers e_0 in output 0 (it
    # disturbs) and e_1 in output 1; model 0 leaves e_1 alone.
    x0, x1 = torch.tensor([[1.0, 0.0]] * 4), torch.tensor([[0.0, 1.0]] * 4)
    tau0 = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    tau1 = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    merged = merge(
        "cat", [tau0, tau1], base=torch.zeros(2, 2), statistics=statistics([x0, x1]),
        directions=1, penalty=0.0,
    )  # fmt: skip
    # Output 0 of model 1 goes; what is left, (0, 4) in row 1, is scaled back to 5.
    torch.testing.assert_close(merged, torch.tensor([[0.0, 0.0], [2.0, 5.0]]))


def test_cat_against_eigenvectors(merge):
    base, xs = normal(OUT, WIDTH, seed=9), texts((30, 60, 90))
    vectors = [normal(OUT, WIDTH, seed=20 + i) for i in range(3)]
    grams = [s * x.T @ x for s, x in zip(shares_of(xs), xs, strict=True)]
    protected = []
    for i in range(3):
        total = sum(
            vectors[j] @ (grams[i] - 0.5 * grams[j]) @ vectors[j].T for j in {0, 1, 2} - {i}
        )
        values, directions = torch.linalg.eigh(total)
        protected.append(directions[:, -2:][:, values[-2:] > 0])
    assert {p.shape[1] for p in protected} >= {2}
    expected = base.clone()
    for j, vector in enumerate(vectors):
        others = torch.cat([p for i, p in enumerate(protected) if i != j], dim=1)
        rest = vector - others @ torch.linalg.pinv(others) @ vector
        expected += rest * (vector.norm() / rest.norm())
    models = [base + t for t in vectors]
    merged = merge("cat", models, base=base, statistics=statistics(xs))
    torch.testing.assert_close(merged, expected, rtol=1e-8, atol=1e-8)
    # Where every direction serves its own model more, nothing is taken out.
    alone = merge("cat", models, base=base, statistics=statistics(xs), penalty=1e6)
    torch.testing.assert_close(alone, base + sum(vectors))


@pytest.mark.parametrize("name", ["lot", "slta", "cat"])
def test_units_without_statistics_are_averaged(merge, name):
    a, b = torch.ones(2, 2), torch.full((2, 2), 3.0)
    merged = merge(name, [a, b], base=torch.zeros(2, 2), role=Role.NORM)
    assert torch.equal(merged, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("name", ["lot", "slta", "cat"])
def test_experts_that_no_token_reached(merge, name):
    base = normal(OUT, WIDTH, seed=9)
    empty = UnitStatistics(torch.zeros(WIDTH, WIDTH), 0, 100, 4)
    some = statistics(texts((30,)))[0]
    models = [base + normal(OUT, WIDTH, seed=20 + i) for i in range(2)]
    for known in ([empty, empty], [empty, some]):
        assert torch.isfinite(merge(name, models, base=base, statistics=known)).all()


def known(values, tokens=100, domain=100, sequences=10):
    return UnitStatistics(torch.as_tensor(values), tokens, domain, sequences)


def test_fisher_by_hand(merge):
    models = [torch.tensor([[0.0, 1.0, 8.0]]), torch.tensor([[4.0, 3.0, 0.0]])]
    information = [known([[1.0, 2.0, 0.0]]), known([[3.0, 2.0, 1.0]])]
    merged = merge("fisher", models, statistics=information)
    torch.testing.assert_close(merged, torch.tensor([[3.0, 2.0, 0.0]]), atol=2e-5, rtol=0)
    merged = merge(
        "fisher", models, statistics=information, params=[{"weight": 0.75}, {"weight": 0.25}]
    )
    torch.testing.assert_close(merged, torch.tensor([[2.0, 1.5, 0.0]]), atol=1e-4, rtol=0)


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
