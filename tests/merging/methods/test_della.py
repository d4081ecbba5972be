from __future__ import annotations

import pytest
import torch

from moemerge.errors import ConfigError
from moemerge.merging.methods.sparsified import DellaParams


def keeps(merge, theta, density=0.5, epsilon=0.3, repeats=400, **options):
    """How often each element is kept, over many units."""
    p = {"weight": 1.0, "density": density, "epsilon": epsilon}
    base = torch.zeros_like(theta)
    options = {"rescale": False, **options}
    runs = [
        merge("della_linear", [theta], base=base, params=p, key=f"k{i}", **options)
        for i in range(repeats)
    ]
    return torch.stack(runs)


def test_keep_probability_follows_the_rank_in_the_row(merge):
    row = torch.tensor([5.0, -1.0, 3.0, -4.0, 2.0])
    theta = torch.stack([row, 1000 * row.flip(0), row * 0.001, row.roll(1)])
    frequency = (keeps(merge, theta, repeats=600) != 0).double().mean(0)
    by_rank = torch.tensor([0.2, 0.35, 0.5, 0.65, 0.8], dtype=torch.float64)
    expected = by_rank[(row.abs() - 1).long()]
    for got, want in zip(
        frequency, (expected, expected.flip(0), expected, expected.roll(1)), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=0.06)


def test_rescaling(merge):
    theta = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    p = {"weight": 1.0, "density": 0.5, "epsilon": 0.2}
    l1 = merge("della_linear", [theta], base=torch.zeros(30, 40), params=p)
    torch.testing.assert_close(l1.abs().sum(), theta.abs().sum(), rtol=1e-4, atol=0)
    # divided by each one's own probability, the expectation is the task vector itself
    mean = keeps(merge, theta[:2, :5], repeats=1200, rescale=True, rescale_norm="probability")
    torch.testing.assert_close(mean.mean(0), theta[:2, :5], rtol=0.2, atol=0.1)


def test_rows_of_one_element_are_kept_with_the_density(merge):
    kept = (keeps(merge, torch.ones(2000, 1), repeats=3) != 0).double().mean()
    assert abs(kept - 0.5) < 0.04


def test_a_vector_is_one_row_and_convolutions_have_a_row_per_output(merge):
    theta = torch.tensor([1.0, 2.0, 3.0])
    frequency = (keeps(merge, theta) != 0).double().mean(0)
    torch.testing.assert_close(
        frequency, torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64), rtol=0, atol=0.07
    )
    cube = (keeps(merge, theta.view(1, 1, 3)) != 0).double().mean(0).flatten()
    assert torch.equal(cube, frequency)


@pytest.mark.parametrize(("density", "epsilon"), [(0.9, 0.15), (0.1, 0.15)])
def test_impossible_probabilities_are_refused(density, epsilon):
    with pytest.raises(ConfigError, match=r"outside \[0, 1\]"):
        DellaParams(weight=1.0, density=density, epsilon=epsilon)


def test_probabilities_up_to_the_ends_are_allowed():
    DellaParams(weight=1.0, density=0.85, epsilon=0.15)
    DellaParams(weight=1.0, density=0.15, epsilon=0.15)
    DellaParams(weight=1.0, density=1.0, epsilon=0.15)


def test_at_full_density_signs_are_elected_or_models_summed(merge):
    p = [{"weight": 1.0}, {"weight": 2.0}]
    tensors = [[3.0, 1.0], [-1.0, 1.0]]
    assert merge("della", tensors, base=[0.0, 0.0], params=p).tolist() == [3.0, 1.0]
    assert merge("della_linear", tensors, base=[0.0, 0.0], params=p).tolist() == [1.0, 3.0]


def test_each_model_has_its_own_mask(merge):
    ones, zeros = torch.ones(100, 100), torch.zeros(100, 100)
    p = [{"weight": w, "density": 0.5, "epsilon": 0.0} for w in (1.0, 10.0)]
    out = merge("della_linear", [ones, ones], base=zeros, params=p, rescale=False)
    assert abs((out == 11).double().mean() - 0.25) < 0.03
