from __future__ import annotations

import pytest
import torch

N = 40_000


def task(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(200, 200, generator=g), torch.randn(200, 200, generator=g)


def kept_by(merge, **kw):
    base, theta = torch.zeros(200, 200), torch.ones(200, 200)
    p = {"weight": 1.0, "density": 0.3}
    return merge("dare_linear", [theta], base=base, params=p, rescale=False, **kw) != 0


def test_density_and_untouched_survivors(merge):
    base, theta = task()
    p = {"weight": 1.0, "density": 0.3}
    out = merge("dare_linear", [theta], base=base, params=p, rescale=False)
    kept = out != base
    assert abs(kept.double().mean() - 0.3) < 0.012
    torch.testing.assert_close(out[kept], theta[kept])


def test_rescaling(merge):
    base, theta = task()
    p = {"weight": 1.0, "density": 0.3}
    delta = theta - base
    l1 = merge("dare_linear", [theta], base=base, params=p) - base
    torch.testing.assert_close(l1.abs().sum(), delta.abs().sum(), rtol=1e-4, atol=0)
    paper = merge("dare_linear", [theta], base=base, params=p, rescale_norm="probability") - base
    kept = paper.abs() > 1e-3
    torch.testing.assert_close(paper[kept], delta[kept] / 0.3, rtol=1e-4, atol=1e-5)


def test_masks_differ_by_model_tensor_and_seed_and_by_nothing_else(merge):
    first = kept_by(merge)
    assert torch.equal(first, kept_by(merge))
    for other in (kept_by(merge, key="other"), kept_by(merge, seed=1)):
        overlap = (first & other).double().mean()
        assert abs(overlap - 0.09) < 0.01
    ones, zeros = torch.ones(200, 200), torch.zeros(200, 200)
    p = [{"weight": 1.0, "density": 0.3}, {"weight": 10.0, "density": 0.3}]
    both = merge("dare_linear", [ones, ones], base=zeros, params=p, rescale=False)
    assert torch.equal(both.remainder(10) == 1, first)
    assert abs((both == 11).double().mean() - 0.09) < 0.01


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_ends_of_density(merge, name):
    base, theta = task()
    whole = merge(name, [theta], base=base, params={"weight": 1.0})
    torch.testing.assert_close(whole, theta)
    nothing = merge(name, [theta], base=base, params={"weight": 1.0, "density": 0.0})
    assert torch.equal(nothing, base)


def test_at_full_density_signs_are_elected_by_hand(merge):
    p = [{"weight": 1.0}, {"weight": 2.0}]
    args = ([[3.0, 1.0], [-1.0, 1.0]],)
    out = merge("dare_ties", *args, base=[0.0, 0.0], params=p)
    assert out.tolist() == [3.0, 3.0]  # 3 beats -2; not divided unless asked for
    out = merge("dare_ties", *args, base=[0.0, 0.0], params=p, normalize=True)
    assert out.tolist() == [3.0, 1.0]
    out = merge("dare_linear", *args, base=[0.0, 0.0], params=p)
    assert out.tolist() == [1.0, 3.0]


def test_rescale_factors_do_not_enter_the_divisor(merge):
    """Both agree everywhere: where both survive, the result is their mean, scaled up."""
    ones, zeros = torch.ones(200, 200), torch.zeros(200, 200)
    p = [{"weight": 1.0, "density": 0.5}] * 2
    out = merge(
        "dare_ties", [ones, ones], base=zeros, params=p, normalize=True,
        rescale_norm="probability",
    )  # fmt: skip
    assert out.unique().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("name", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_of_a_small_tensor_nothing_may_be_left_which_is_no_error(merge, name):
    p = {"weight": 1.0, "density": 0.3}
    results = [merge(name, [[2.0]], base=[0.0], params=p, key=f"k{i}").item() for i in range(50)]
    assert set(results) == {0.0, 2.0}  # rescaled to its L1 norm, where it is kept
