from __future__ import annotations

import pytest
import torch

THETA = [1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0, 9.0, -10.0]
ZERO = [0.0] * 10


def kept(merge, density, gamma, theta=THETA):
    p = {"weight": 1.0, "density": density, "gamma": gamma}
    out = merge("breadcrumbs", [theta], base=[0.0] * len(theta), params=p)
    return [int(abs(x)) for x in out.tolist() if x]


@pytest.mark.parametrize(
    ("density", "gamma", "expected"),
    [
        (0.5, 0.2, [4, 5, 6, 7, 8]),
        (0.5, 0.0, [6, 7, 8, 9, 10]),
        (0.9, 0.2, [1, 2, 3, 4, 5, 6, 7, 8, 9]),  # density has precedence
        (1.0, 0.2, list(range(1, 11))),
        (0.3, 0.05, [8, 9, 10]),  # int(0.05·10) is none: nothing is dropped on top
        (0.0, 0.2, []),
    ],
)
def test_which_elements_are_kept(merge, density, gamma, expected):
    assert kept(merge, density, gamma) == expected


def test_small_tensors_survive(merge):
    assert kept(merge, 0.9, 0.01, [1.0, 2.0, 3.0]) == [2, 3]
    assert kept(merge, 0.9, 0.01, [1.0]) == [1]


def test_ties_go_to_the_lower_index_at_both_cuts(merge):
    p = {"weight": 1.0, "density": 0.4, "gamma": 0.2}
    out = merge("breadcrumbs", [torch.ones(10)], base=ZERO, params=p)
    assert out.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0]


def test_sum_and_election_by_hand(merge):
    a, b = [4.0, 1.0, 9.0], [-3.0, 2.0, 8.0]
    p = [{"weight": 1.0, "density": 0.34, "gamma": 0.34}, {"weight": 2.0, "density": 0.34,
         "gamma": 0.34}]  # fmt: skip
    # each drops its largest (9, 8) and keeps one: 4 and -3
    out = merge("breadcrumbs", [a, b], base=[0.0] * 3, params=p)
    assert out.tolist() == [-2.0, 0.0, 0.0]
    out = merge("breadcrumbs", [a, b], base=[0.0] * 3, params=p, normalize=True, lambda_=3.0)
    torch.testing.assert_close(out, torch.tensor([-2.0, 0.0, 0.0]))
    out = merge("breadcrumbs_ties", [a, b], base=[0.0] * 3, params=p)
    assert out.tolist() == [-6.0, 0.0, 0.0]
    out = merge("breadcrumbs_ties", [a, b], base=[0.0] * 3, params=p, normalize=True)
    assert out.tolist() == [-3.0, 0.0, 0.0]


def test_rescale(merge):
    p = {"weight": 1.0, "density": 0.5, "gamma": 0.2}
    out = merge("breadcrumbs", [THETA], base=ZERO, params=p, rescale=True)
    torch.testing.assert_close(out.abs().sum(), torch.tensor(55.0))
