from __future__ import annotations

import pytest
import torch

BASE = [0.0, 0.0, 0.0, 0.0]
A = [4.0, -3.0, 1.0, 2.0]  # at density 0.5 trimmed to 4 -3 0 0
B = [-1.0, -5.0, 2.0, 6.0]  # trimmed to 0 -5 0 6


def params(density=1.0, weights=(1.0, 3.0)):
    return [{"weight": w, "density": density} for w in weights]


def test_trimmed_by_hand(merge):
    out = merge("ties", [A, B], base=BASE, params=params(0.5))
    assert out.tolist() == [4.0, (-3.0 - 15.0) / 4, 0.0, 6.0]
    out = merge("ties", [A, B], base=BASE, params=params(0.5), normalize=False, lambda_=0.5)
    assert out.tolist() == [2.0, -9.0, 0.0, 9.0]


def test_who_votes(merge):
    # element 0: 1·4 against 3·(-1): weighted 4 - 3 > 0; with weights 1, 5: 4 - 5 < 0
    out = merge("ties", [A, B], base=BASE, params=params(weights=(1.0, 3.0)))
    assert out[0] == 4.0
    out = merge("ties", [A, B], base=BASE, params=params(weights=(1.0, 5.0)))
    assert out[0] == -1.0
    out = merge("ties", [A, B], base=BASE, params=params(weights=(1.0, 5.0)), election="unweighted")
    assert out[0] == 4.0


def test_a_tied_vote_elects_plus(merge):
    out = merge("ties", [[2.0], [-2.0]], base=[0.0], params=params(weights=(1.0, 1.0)))
    assert out.tolist() == [2.0]


def test_negative_weight_by_hand(merge):
    # contributions 1·4 and -3·(-1) = 3 agree: (4 + 3) / (1 - 3)
    out = merge("ties", [[4.0], [-1.0]], base=[0.0], params=params(weights=(1.0, -3.0)))
    assert out.tolist() == [-3.5]
    # 2·1 and -2·(-1) agree, and their weights cancel: not divided
    out = merge("ties", [[1.0], [-1.0]], base=[0.0], params=params(weights=(2.0, -2.0)))
    assert out.tolist() == [4.0]


def test_zero_weight_does_not_count(merge):
    out = merge("ties", [A, B], base=BASE, params=params(weights=(0.0, 3.0)))
    assert out.tolist() == B
    out = merge("ties", [A, B], base=BASE, params=params(weights=(0.0, 0.0)))
    assert out.tolist() == BASE


def test_rescale_restores_the_l1_norm(merge):
    # |A| sums to 10, kept 7
    out = merge("ties", [A], base=BASE, params=[{"weight": 1.0, "density": 0.5}], rescale=True)
    torch.testing.assert_close(out, torch.tensor([40 / 7, -30 / 7, 0, 0]))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_tiny_tensor_keeps_at_least_one_element(merge, n):
    theta = torch.arange(1.0, n + 1)
    p = [{"weight": 1.0, "density": 0.1}]
    out = merge("ties", [theta], base=torch.zeros(n), params=p)
    assert out.tolist() == [0.0] * (n - 1) + [float(n)]
    p = [{"weight": 1.0, "density": 0.0}]
    assert not merge("ties", [theta], base=torch.zeros(n), params=p).any()


def reference(thetas, base, weights, density):
    """The definition, element by element in float64, by full sorting."""
    deltas = torch.stack([t.double() - base.double() for t in thetas]).flatten(1)
    k = int(density * deltas.shape[1])
    for d in deltas:
        d[d.abs().sort(descending=True, stable=True).indices[k:]] = 0
    w = torch.tensor(weights, dtype=torch.float64)[:, None]
    votes = w * deltas
    s = votes.sum(0).sign()
    s[s == 0] = 1
    m = votes.sign() == s
    divisor = (w * m).sum(0)
    divisor[divisor == 0] = 1
    return base.double() + ((votes * m).sum(0) / divisor).view_as(base)


def test_a_large_tensor_against_the_definition(merge):
    g = torch.Generator().manual_seed(0)
    base = torch.randn(300, 500, generator=g).double().float()
    thetas = [base + 0.1 * torch.randn(300, 500, generator=g) for _ in range(3)]
    weights = [0.4, 0.7, 0.3]
    p = [{"weight": w, "density": 0.3} for w in weights]
    # subtraction in float32 moves a few deltas past each other: give both sides the same ones
    exact = [t.double() for t in thetas]
    out = merge("ties", exact, base=base.double(), params=p)
    torch.testing.assert_close(out, reference(exact, base, weights, 0.3), rtol=1e-12, atol=1e-12)
    narrow = merge("ties", thetas, base=base, params=p)
    assert ((narrow - out).abs() > 1e-5).sum() <= 10
