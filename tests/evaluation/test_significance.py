"""Standard errors and paired tests against values from printed tables and by hand."""

from __future__ import annotations

import math

import pytest

from moemerge.evaluation.significance import (
    incomplete_beta,
    mcnemar,
    mean,
    paired_t,
    sign_test,
    student_two_sided,
)
from moemerge.experiments.problems import pack, unpack


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


def test_incomplete_beta_has_its_closed_forms():
    for x in (0.05, 0.3, 0.5, 0.8, 0.99):
        assert incomplete_beta(1, 1, x) == pytest.approx(x)
        assert incomplete_beta(3, 1, x) == pytest.approx(x**3)
        assert incomplete_beta(0.5, 0.5, x) == pytest.approx(2 / math.pi * math.asin(x**0.5))
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)


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
