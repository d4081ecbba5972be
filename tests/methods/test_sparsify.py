"""Random masks and the choice of the largest elements."""

import math

import pytest
import torch

from moemerge.methods._sparsify import (
    TaskVector,
    draw,
    keep_largest,
    keep_threshold,
    kept_count,
    random_keep,
)
from moemerge.methods.della import ascending_order

CPU = torch.device("cpu")


def keep_randomly(values, probability, seed):
    return values * random_keep(seed, values[None], 0, keep_threshold(probability))[0]


N = 1 << 18


def draws(seed, start=0, count=N):
    return draw(seed, start, count, CPU)


def uniform(seed, **kw):
    return (draws(seed, **kw).double() + 2**15) / 2**16


def test_against_plain_integers():
    """The arithmetic wraps like 32-bit words, in vector bodies and in their tails; an element
    has one half of its word, wherever a draw begins."""

    def mix64(x):
        m = 2**64 - 1
        x = (x + 0x9E3779B97F4A7C15) & m
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m
        return x ^ (x >> 31)

    def reference(seed, index):
        w = 2**32 - 1
        word = index // 2
        key = mix64(seed)
        h = ((word & w) * 0x9E3779B9 + key) & w
        h = ((h ^ (h >> 16)) * 0x7FEB352D + (key >> 32)) & w
        h = ((h ^ (h >> 15)) * 0x846CA68B) & w
        h ^= h >> 16
        half = (h >> 16) if index % 2 else h & 0xFFFF
        return half - 2**16 if half >= 2**15 else half

    for start in (0, 5, 2**31 - 3, 2**33 - 40):
        got = draws(12345678901234567, start, 37).tolist()
        assert got == [reference(12345678901234567, start + i) for i in range(37)]


def test_any_split_gives_the_same_numbers():
    whole = draws(99, 0, 1000)
    parts = [draws(99, s, min(300, 1000 - s)) for s in range(0, 1000, 300)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("seed", [0, 1, 2, 2**62 + 1])
def test_moments_and_chi_square(seed):
    u = uniform(seed)
    sigma = math.sqrt(1 / 12 / N)
    assert abs(u.mean() - 0.5) < 5 * sigma
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / N)
    cells = 1024
    counts = torch.histc(u, cells, 0, 1)
    chi2 = ((counts - N / cells) ** 2 / (N / cells)).sum()
    assert abs(chi2 - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1))


def test_neighbouring_indexes_and_streams_are_independent():
    bound = 5 / math.sqrt(N)
    u = uniform(7) - 0.5
    for lag in (1, 2, 3, 64, 1024, 2048):
        assert abs((u[lag:] * u[:-lag]).mean() * 12) < bound
    for other in (6, 8, 7 + 2**32, 7 + 2**40):
        v = uniform(other) - 0.5
        assert abs((u * v).mean() * 12) < bound
        # nor is one stream a shifted copy of the other
        mine, theirs = (draws(s, count=8192).view(torch.int32).tolist() for s in (7, other))
        assert len(set(mine) & set(theirs)) < 4
    # pairs of neighbours fill the square evenly
    cells = 32
    at = (uniform(7) * cells).long()
    pairs = torch.bincount(at[:-1] * cells + at[1:], minlength=cells**2).double()
    chi2 = ((pairs - (N - 1) / cells**2) ** 2 / ((N - 1) / cells**2)).sum()
    assert abs(chi2 - (cells**2 - 1)) < 5 * math.sqrt(2 * cells**2)


@pytest.mark.parametrize("p", [0.0, 0.001, 0.4, 0.999, 1.0])
def test_keep_probability(p):
    values = keep_randomly(torch.ones(N), p, 5)
    assert abs(values.mean() - p) <= 5 * math.sqrt(p * (1 - p) / N)
    assert set(values.unique().tolist()) <= {0.0, 1.0}


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
    assert torch.equal(keep_largest(values, k), by_sorting(values, k))
    rows = values[: values.numel() // 7 * 7].view(-1, 7) if values.numel() > 7 else values[None]
    k = min(k, rows.numel())
    blocks = lambda: iter(rows.clone().split(100))  # noqa: E731
    cut, expected = TaskVector(rows.shape, blocks, id).largest(k), by_sorting(rows.flatten(), k)
    kept, dropped = rows.clone(), rows.clone()
    for first in range(0, len(rows), 100):
        cut.keep(kept[first : first + 100], first)
        cut.drop(dropped[first : first + 100], first)
    assert torch.equal(kept.flatten(), expected)
    assert torch.equal(dropped.flatten(), rows.flatten() - expected)


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
