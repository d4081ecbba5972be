import pytest
import torch

from moemerge.routing import products
from moemerge.routing.gates import TokenWeights
from moemerge.routing.products import Features, coalesced, features_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def dense(x, columns):
    wide = x.double()
    return wide if columns == x.shape[1] else torch.cat([wide, wide.new_ones(len(x), 1)], dim=1)


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_products_equal_their_dense_twins(dtype, bias):
    torch.manual_seed(0)
    x = torch.randn(50, 12).to(dtype)
    features = features_of(x, 12 + bias)
    assert type(features) is Features
    xx, v = dense(x, 12 + bias), torch.randn(6, 12 + bias, dtype=torch.float64)
    z = xx @ v.T
    assert error(features.logits(v), z) < 1e-14
    assert error(features.working_logits(v), z) < 1e-6
    assert error(features.outer(z), z.T @ xx) < 1e-14
    h = torch.rand(50, 6)
    assert error(features.squares(h), h.double().T @ xx**2) < 1e-6
    t = torch.rand(50)
    assert error(features.gram(t), (xx * t.double()[:, None]).T @ xx) < 1e-6
    p = torch.softmax(torch.randn(50, 6), dim=-1)
    u = p * (z - (p * z).sum(-1, keepdim=True))
    for accurate, bound in ((True, 1e-14), (False, 1e-6)):
        start = torch.randn_like(v)
        got = start.clone()
        features.add_curvature(got, TokenWeights(p, p), v, 0.5, accurate=accurate)
        assert error(got, start + 0.5 * u.T @ xx) < bound
    assert features.representable(v) is v


@pytest.fixture
def kernels_serve_all(monkeypatch):
    """As on a GPU, where blocks are put together."""
    monkeypatch.setattr(products.fused, "usable", lambda x: True)
    monkeypatch.setattr(products, "WORTH_A_LAUNCH", 10)


def parts_of(*blocks):
    made = []
    for block in blocks:
        p = torch.rand(len(block), 3)
        made.append((block, TokenWeights(p, p)))
    return made


def joined(*blocks):
    given = parts_of(*blocks)
    got = list(coalesced(given))
    assert torch.equal(torch.cat([x for x, _ in got]), torch.cat(blocks))
    weights = [w.diagonal for _, w in given if w.diagonal is not None]
    assert torch.equal(
        torch.cat([w.diagonal for _, w in got if w.diagonal is not None]), torch.cat(weights)
    )
    assert all(w.rank_one is w.diagonal for _, w in got)
    return got


@pytest.mark.usefixtures("kernels_serve_all")
def test_neighbours_in_memory_become_one_block_without_a_copy():
    buffer = torch.randn(50, 4)
    ((x, _),) = joined(buffer[:7], buffer[7:30], buffer[30:])
    assert x.data_ptr() == buffer.data_ptr()


@pytest.mark.usefixtures("kernels_serve_all")
def test_small_blocks_are_copied_together_and_large_ones_left_alone():
    buffer = torch.randn(40, 4)
    apart = [torch.randn(4, 4) for _ in range(5)]
    got = joined(*apart, buffer[:20], buffer[20:])
    assert [len(x) for x, _ in got] == [12, 8, 40]
    assert got[-1][0].data_ptr() == buffer.data_ptr()
    assert [len(x) for x, _ in joined(buffer[20:], buffer[:20])] == [20, 20]


def test_plain_blocks_stay_as_they_are():
    buffer = torch.randn(50, 4)
    assert [len(x) for x, _ in joined(buffer[:7], buffer[7:])] == [7, 43]
