from __future__ import annotations

import pytest
import torch

from moemerge.merging.methods._selection import (
    ascending_order,
    drop_cut_,
    keep_largest_,
    kept_count,
    magnitude_cut,
)


def by_sorting(values, k):
    """The k largest magnitudes by a full stable sort, lower index first."""
    order = values.abs().sort(descending=True, stable=True).indices[:k]
    out = torch.zeros_like(values)
    out[order] = values[order]
    return out


def cases():
    g = torch.Generator().manual_seed(0)
    random = torch.randn(200_001, generator=g)
    yield "random", random
    yield "rounded", random.bfloat16().float()
    yield "coarse", (random * 2).round()
    yield "constant", torch.full((5000,), -0.25)
    yield "zeros", torch.zeros(300)
    yield "mostly zero", random * (torch.rand(random.shape, generator=g) < 0.1)
    yield "signs", torch.tensor([1.0, -1.0, 1.0, -1.0, 0.5, -2.0, 1.0])
    yield "one", torch.tensor([3.0])
    yield "two", torch.tensor([-1.0, 1.0])
    yield "tiny numbers", random[:1000] * 1e-40  # subnormal
    yield "ascending", torch.arange(1000.0)
    yield "striped", random * (torch.arange(len(random)) % 13 > 0)  # a sample has only zeros
    yield "wide", random.double()
    yield "wide rounded", random.bfloat16().double()


@pytest.mark.parametrize("values", [v for _, v in cases()], ids=[n for n, _ in cases()])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.2, 0.5, 0.6, 0.95, 1.0])
def test_equals_a_full_stable_sort(values, density):
    k = kept_count(density, values.numel())
    kept = values.clone()
    keep_largest_(kept, k)
    assert torch.equal(kept, by_sorting(values, k))
    rest = values.clone()
    if k:
        drop_cut_(rest, magnitude_cut(rest, k))
    assert torch.equal(rest, values - by_sorting(values, k))


def test_exactly_k_survive_among_ties():
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    for k in (1, 10, 1234, 69_999):
        kept = values.clone()
        keep_largest_(kept, k)
        assert (kept != 0).sum() == k


def test_the_cut():
    cut = magnitude_cut(torch.tensor([2.0, -1.0, 1.0, 0.5, -1.0]), 2)
    assert (cut.magnitude, cut.kept, cut.excess) == (1.0, 1, 2)


@pytest.mark.parametrize(
    ("density", "n", "k"),
    [(0.0, 10, 0), (0.01, 10, 1), (0.3, 10, 3), (0.999, 10, 9), (1.0, 10, 10), (0.5, 1, 1),
     (0.5, 0, 0)],
)  # fmt: skip
def test_kept_count(density, n, k):
    assert kept_count(density, n) == k


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ascending_order_is_a_stable_argsort(dtype):
    rows = torch.randn(13, 257, generator=torch.Generator().manual_seed(2), dtype=dtype)
    rows = (rows * 4).round() / 4  # many ties, both zeros
    expected = rows.abs().sort(dim=1, stable=True).indices
    assert torch.equal(ascending_order(rows), expected)
