"""Standard errors and paired tests against values from printed tables and by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from evidence.packing import pack, unpack
from moemerge.lab.scores import EvaluationReport, TaskScores, compare_models
from moemerge.lab.significance import (
    drawn_means,
    flipped_means,
    interval,
    mcnemar,
    mean,
    paired_t,
    sign_test,
    student_two_sided,
    two_sided,
)


def test_mean_and_its_standard_error():
    found = mean([1.0, 2.0, 3.0, 6.0])
    assert found.value == 3.0
    # squares of the deviations: 4 + 1 + 0 + 9 = 14; 14 / 3 / 4
    assert found.error == pytest.approx(math.sqrt(14 / 12))
    assert mean([5.0]).error is None


@pytest.mark.parametrize(
    ("t", "degrees", "p"),
    # Quantiles of Student's distribution as they stand in any textbook.
    [(12.706, 1, 0.05), (2.776, 4, 0.05), (4.604, 4, 0.01), (2.042, 30, 0.05), (0.0, 7, 1.0)],
)
def test_students_distribution(t, degrees, p):
    assert student_two_sided(t, degrees) == pytest.approx(p, rel=1e-3)
    assert student_two_sided(-t, degrees) == pytest.approx(p, rel=1e-3)


def test_paired_t_looks_at_differences_only():
    # Differences 1, 2, 3: mean 2, standard error 1/√3, t = 2√3 with 2 degrees of freedom:
    # p = 1 - t / √(2 + t²) for two degrees of freedom.
    found = paired_t([10.0, 20.0, 30.0], [11.0, 22.0, 33.0])
    t = 2 * math.sqrt(3)
    assert found.difference.value == pytest.approx(2)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert (found.wins, found.losses) == (3, 0)


def test_paired_t_where_there_is_nothing_to_tell():
    assert paired_t([1.0], [2.0]).p is None
    assert paired_t([1.0, 2.0], [1.0, 2.0]).p == 1.0
    assert paired_t([1.0, 2.0], [2.0, 3.0]).p is None  # the same gain twice: no spread at all


def test_sign_test_by_hand():
    assert sign_test(0, 0) == 1.0
    assert sign_test(3, 3) == 1.0
    assert sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(1, 5) == pytest.approx(2 * (1 + 6) / 64)
    assert sign_test(9000, 8000) < 1e-13  # no overflow


def test_mcnemar_counts_who_solves_what():
    found = mcnemar([True, True, False, False, False], [True, False, True, True, True])
    assert (found.gained, found.lost) == (3, 1)
    assert found.p == pytest.approx(2 * (1 + 4) / 16)


@pytest.mark.parametrize("solved", [[], [False], [False, False, True], [True] * 9])
def test_packed_bits_come_back(solved):
    assert unpack(pack(solved)) == solved


def scores_of(*rows, name="t", domain="d", single=False):
    table = np.array(rows, dtype=float)
    names = tuple(str(n) for n in range(table.shape[1]))
    return TaskScores(name, name, domain, names, table, single)


def test_draws_have_the_mean_and_the_spread_of_a_mean():
    rng = np.random.default_rng(0)
    scores = rng.random((2, 50))
    drawn = drawn_means(scores, 20_000, np.random.default_rng(1))
    error = scores.std(axis=1, ddof=1) / math.sqrt(50)
    assert drawn.mean(axis=0) == pytest.approx(scores.mean(axis=1), abs=5 * error[0] / 141)
    assert drawn.std(axis=0) == pytest.approx(error, rel=0.03)


def test_flips_give_the_exact_test_where_scores_are_zero_or_one():
    first = np.array([0] * 9 + [1] * 3 + [1] * 20, dtype=float)
    second = np.array([1] * 9 + [0] * 3 + [1] * 20, dtype=float)
    row = compare_models([scores_of(first, second, single=True)], ["a", "b"], draws=50_000, seed=0)[
        0
    ]
    pair = row.pairs[0]
    assert (pair.won, pair.lost) == (9, 3)
    assert pair.mcnemar is not None
    # 2 · (C(12,0) + C(12,1) + C(12,2) + C(12,3)) / 2¹²
    assert pair.mcnemar.p == pytest.approx(2 * (1 + 12 + 66 + 220) / 4096)
    assert pair.p == pytest.approx(pair.mcnemar.p, abs=0.007)
    assert not pair.significant


def test_p_decides_where_few_problems_differ():
    first, second = np.zeros(20), np.array([1.0] * 5 + [0.0] * 15)
    task = scores_of(first, second, single=True)
    pair = compare_models([task], ["a", "b"], draws=2000, seed=0)[0].pairs[0]
    assert pair.interval[0] > 0
    assert pair.mcnemar is not None
    assert pair.mcnemar.p == pytest.approx(2 / 2**5)
    assert not pair.significant


def test_errors_are_clustered_by_problem():
    """Sixteen equal samples of a problem say no more than one."""
    row = compare_models([scores_of([1, 0, 1, 1])], ["a"], draws=100, seed=0)[0]
    assert row.scores["a"].mean == 0.75
    assert row.scores["a"].error == pytest.approx(0.25)  # √(0.75 / 3 / 4)


def test_averages_weigh_domains_alike():
    tasks = [
        scores_of([1, 1], [0, 0], name="x", domain="math"),
        scores_of([0, 0, 0], [0, 0, 0], name="y", domain="math"),
        scores_of([1, 0], [1, 1], name="z", domain="code"),
    ]
    rows = {row.name: row for row in compare_models(tasks, ["a", "b"], draws=200, seed=0)}
    assert list(rows) == ["x", "y", "math", "z", "overall"]
    assert rows["math"].scores["a"].mean == 0.5
    assert rows["overall"].scores["a"].mean == pytest.approx((0.5 + 0.5) / 2)
    assert rows["overall"].pairs[0].difference == pytest.approx((-0.5 + 0.5) / 2)
    assert rows["overall"].scores["a"].error == pytest.approx(0.25)  # z alone varies: 0.5 / 2
    assert rows["y"].pairs[0].interval == (0, 0)
    assert rows["y"].pairs[0].p == 1


def test_the_seed_decides():
    rng = np.random.default_rng(3)
    task = scores_of(*rng.random((2, 30)))
    same = [
        compare_models([task], ["a", "b"], draws=300, seed=seed)[0].pairs[0] for seed in (0, 0, 1)
    ]
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize("n", [60, 164])
def test_intervals_cover_the_truth_and_zero_is_rarely_called_significant(n):
    """Simulated evaluations: 400 draws, so within 3.5 standard errors."""
    rng = np.random.default_rng(n)
    covered = called = 0
    for _draw in range(400):
        skill = rng.beta(1, 1, size=n)
        better = np.clip(skill + rng.normal(0, 0.2, n), 0, 1)
        tables = rng.binomial(4, np.stack([skill, better])) / 4
        # The truth is the mean over all problems there might be: zero, by symmetry of the clipping.
        drawn = drawn_means(tables, 400, rng)
        low, high = interval(drawn[:, 1] - drawn[:, 0])
        covered += low <= 0 <= high
        gaps = tables[1] - tables[0]
        p = two_sided(float(gaps.mean()), flipped_means(gaps[None], 400, rng)[:, 0])
        called += p < 0.05
    assert covered / 400 == pytest.approx(0.95, abs=0.038)
    assert called / 400 <= 0.05 + 0.038


def test_one_problem_says_nothing_about_others():
    """Drawn again it is always itself; an interval without width would be a lie."""
    row = compare_models([scores_of([0], [1], single=True)], ["a", "b"], draws=100, seed=0)[0]
    assert row.scores["b"].error is None
    assert row.scores["b"].interval == (0.0, 1.0)
    assert row.pairs[0].interval == (-1.0, 1.0)
    assert not row.pairs[0].significant


def report_of(*solved, draws=2000):
    """Models `a`, `b`, … on one task with one sample per problem."""
    names = "abc"[: len(solved)]
    scores = np.array(solved, dtype=float)
    problems = tuple(map(str, range(scores.shape[1])))
    task = TaskScores("t", "Task", "math", problems, scores, True)
    rows = compare_models([task], names, draws=draws, seed=0)
    return EvaluationReport("p", {}, {name: name for name in names}, (task,), rows)


def test_a_winner_needs_the_paired_test():
    few, more, many = [0] * 40, [1] * 2 + [0] * 38, [1] * 30 + [0] * 10
    assert report_of(few, many).headline == "b is better than a, by 75.0 points of Task"
    told = "b is not distinguishable from a: they differ by 5.0 points of Task"
    assert report_of(few, more).headline == told
    told = "b scores most, 5.0% of Task, but is not distinguishable from a, c"
    assert report_of(few, more, few).headline == told
    assert report_of(few, many, more).headline == "b is best: 75.0% of Task"
    told = "c scores most, 75.0% of Task, but is not distinguishable from b"
    assert report_of(few, [1] * 29 + [0] * 11, many).headline == told


def test_p_is_shown_to_the_resolution_of_its_draws():
    (pair,) = report_of([0] * 40, [1] * 30 + [0] * 10).rows[0].pairs
    assert pair.mcnemar is not None
    assert pair.decisive_p == pair.mcnemar.p
    assert pair.p_text == pair.to_json()["p_text"] == "< 1e-4"
    drawn = replace(pair, mcnemar=None)
    assert drawn.p == pytest.approx(1 / 2001)
    assert drawn.p_text == "< 5e-4"
    assert replace(drawn, p=1 / 10_001, draws=10_000).p_text == "< 1e-4"
    assert replace(drawn, p=0.04).p_text == "0.040"


def test_a_merge_is_first_compared_with_its_base_and_its_best_source():
    few, some, many = [0] * 40, [1] * 20 + [0] * 20, [1] * 30 + [0] * 10
    base_and_sources = {"b": "base", "c": "source"}
    report = replace(report_of(few, some, many), inputs={"a": base_and_sources})
    assert report.headline == "a is worse than the base, b: -50.0 points of Task (p < 1e-4)"
    assert report.verdicts == report.to_json()["verdicts"]
    assert report.verdicts[1].startswith("a is worse than its source, c: -75.0 points")
    report = replace(report_of(few, some, [1] * 21 + [0] * 19), inputs={"c": {"b": "base"}})
    assert report.headline.startswith("c is better than a: +52.5 points of Task (p < 1e-4); not ")
    assert "; not distinguishable from the base, b: +2.5 points" in report.headline
    report = replace(report_of(few, few), inputs={"a": {"b": "base"}})
    assert report.headline.startswith("a is not distinguishable from the base, b: +0.0 points")
    # A merge that is better than all its inputs is not held back, nor by another, worse merge.
    inputs = {"c": {"b": "base"}, "a": {"b": "base"}}
    report = replace(report_of(few, some, many), inputs=inputs)
    assert report.headline == "c is best: 75.0% of Task"
    assert [text.split(":")[0] for text in report.verdicts] == [
        "c is better than a",
        "c is better than the base, b",
        "a is worse than the base, b",
    ]
    report = replace(report_of(some, few, many), inputs={"c": {"a": "source", "b": "source"}})
    assert report.verdicts[0].startswith("c is better than the best single source, a: +25.0")


def test_later_merges_are_compared_with_the_first():
    source, merged, refitted = [1] * 40, [1] * 10 + [0] * 30, [1] * 30 + [0] * 10
    inputs = {"b": {"a": "source"}, "c": {"a": "source"}}
    report = replace(report_of(source, merged, refitted), inputs=inputs)
    assert report.headline == (
        "c is better than b: +50.0 points of Task (p < 1e-4); "
        "worse than its source, a: -25.0 points of Task (p 0.002)"
    )
    assert report.verdicts[0] == "c is better than b: +50.0 points of Task (p < 1e-4)"
    assert report.other_verdicts == report.verdicts[2:]
    (other,) = report.other_verdicts
    assert other.startswith("b is worse than its source, a: -75.0 points")
    # If the repair is worse, the headline is about the merge.
    report = replace(report_of(source, refitted, merged), inputs=inputs)
    assert report.headline.startswith("b is worse than its source, a")
    assert report.other_verdicts[0].startswith("c is worse than b: -50.0 points")
    # Without known inputs, the first model is the merge; of two, the headline compares.
    report = report_of(merged, refitted, source)
    assert report.headline == "c is best: 100.0% of Task"
    assert [text.split(":")[0] for text in report.verdicts] == [
        "c is better than a",
        "b is better than a",
    ]
    assert report_of(merged, refitted).verdicts == []
