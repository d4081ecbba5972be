"""Polar factors by products, and that methods do not depend on which way is taken."""

from __future__ import annotations

import pytest
import torch

from moemerge.merging.methods import _spectra
from moemerge.merging.methods._spectra import Definite, polar_factor

SHAPES = [(12, 20), (20, 12), (16, 16), (1, 7), (7, 1)]
METHODS = {"tsv": {}, "iso_c": {}, "iso_cts": {}, "wudi": {"solver": "exact"}}


@pytest.fixture
def anywhere(monkeypatch):
    """Products wherever they may be taken, as on a GPU."""
    monkeypatch.setattr(_spectra, "PRODUCTS_ON", {"cpu", "cuda"})
    monkeypatch.setattr(_spectra, "FEWEST", 1)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_values(shape, values, seed=0):
    """A matrix with these singular values, and its polar factor."""
    u, v = (torch.linalg.qr(normal(n, len(values), seed=seed + n)).Q for n in shape)
    return (u * values) @ v.T, u @ v.T


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smallest", [1.0, 0.1, 1e-3, 1e-5])
def test_the_polar_factor_is_that_of_the_singular_value_decomposition(shape, smallest):
    count = min(shape)
    values = torch.logspace(0, torch.tensor(smallest).log10(), count, dtype=torch.float64)
    matrix, expected = with_values(shape, 3e-3 * values)
    found = polar_factor(matrix)
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_what_may_lack_a_direction_is_left_to_a_decomposition(shape):
    count = min(shape)
    low = torch.ones(count, dtype=torch.float64)
    low[-1] = 1e-6  # where the rank is cut
    assert polar_factor(with_values(shape, low)[0]) is None
    low[-1] = 0
    assert polar_factor(with_values(shape, low)[0]) is None
    assert polar_factor(torch.zeros(shape)) is None
    assert polar_factor(torch.ones(shape)) is None
    assert polar_factor(torch.full(shape, torch.nan)) is None
    assert polar_factor(torch.full(shape, torch.inf)) is None


@pytest.mark.parametrize("shape", [(12, 20), (16, 16), (3, 3), (1, 4)])
def test_bounds_hold_the_singular_values(shape):
    matrix = normal(*shape)
    values = torch.linalg.svdvals(matrix)
    known = Definite.of(matrix @ matrix.T)
    assert 0 < known.least <= values[-1] * (1 + 1e-9)
    assert known.most >= values[0] * (1 - 1e-9)
    assert known.least >= values[-1] / shape[0] ** 0.5 * (1 - 1e-9)
    right = normal(5, shape[0], seed=1)
    torch.testing.assert_close(known.solve(right) @ (matrix @ matrix.T), right)


@pytest.mark.parametrize("halvings", [1, 2, 5, 12, 20, 25])
def test_steps_take_every_value_to_one(halvings):
    x = torch.logspace(-halvings, 0, 5001, base=2, dtype=torch.float64)
    for a, b, c in _spectra._steps(halvings):
        x = a * x + b * x**3 + c * x**5
    torch.testing.assert_close(x, torch.ones_like(x), rtol=0, atol=1e-14)


def test_a_cpu_decomposes_and_a_gpu_does_not():
    matrix = torch.zeros(_spectra.FEWEST, 2 * _spectra.FEWEST)
    assert not _spectra.by_products(matrix)
    assert sorted(_spectra.PRODUCTS_ON) == ["cuda"]


def models_of(shape, kind):
    """Base and models; `equal`, `opposite` and `rank one` leave directions out."""
    base, a, b = (normal(*shape, seed=s, dtype=torch.float32) for s in (9, 0, 1))
    one = normal(shape[0], 1, seed=2).float() @ normal(1, shape[1], seed=3).float()
    changes = {
        "unlike": (a, b),
        "equal": (a, a),
        "opposite": (a, -a),
        "rank one": (one, one),
        "one and many": (one, b),
        "steep": (with_values(shape, 10.0 ** -torch.arange(min(shape)).double())[0].float(), b),
        "zeros": (torch.zeros(shape), torch.zeros(shape)),
    }[kind]
    return base, [base + 0.1 * change for change in changes]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "kind", ["unlike", "equal", "opposite", "rank one", "one and many", "steep", "zeros"]
)
def test_methods_give_the_same_by_products(merge, anywhere, monkeypatch, name, shape, kind):
    base, tensors = models_of(shape, kind)
    by_products = merge(name, tensors, base=base, **METHODS[name])
    monkeypatch.setattr(_spectra, "PRODUCTS_ON", frozenset())
    decomposed = merge(name, tensors, base=base, **METHODS[name])
    assert by_products.dtype == base.dtype
    torch.testing.assert_close(by_products, decomposed, rtol=1e-5, atol=1e-6)


def test_a_wide_update_takes_the_way_of_products(merge, anywhere, monkeypatch):
    """Not the other one by mistake: without eigenvectors it still works."""
    base, tensors = models_of((12, 20), "unlike")
    expected = merge("iso_c", tensors, base=base)
    monkeypatch.delattr(torch.linalg, "eigh")
    assert torch.equal(merge("iso_c", tensors, base=base), expected)
