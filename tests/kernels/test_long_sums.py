"""Long sums of bf16 terms: against float64, on a CPU, which sums them up as a GPU does."""

import logging
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moemerge.kernels import availability, long_sums
from moemerge.kernels.long_sums import COLUMNS, SHORT, add_gram, add_product
from moemerge.kernels.splitting import representable, split


def draw(tokens, width, seed):
    """With a mean that is large beside the spread."""
    rng = torch.Generator().manual_seed(seed)
    return 30.0 + torch.randn(tokens, width, generator=rng)


def product(left, right, terms, weights=None):
    shape = left.shape[1], right.shape[1]
    total = torch.zeros(shape, dtype=torch.float64, device=left.device)
    add_product(total, left, right, terms, weights)
    return total


@pytest.mark.parametrize("tokens", [1, SHORT - 1, SHORT, 3 * SHORT + 5])
def test_every_token_counts_once(tokens):
    left, right = draw(tokens, 5, 0), draw(tokens, 3, 1).bfloat16()
    for one in (left, left.bfloat16()):
        want = one.double().T @ right.double()
        torch.testing.assert_close(product(one, right, terms=3), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("width", [3, COLUMNS, COLUMNS + 5, 2 * COLUMNS])
@pytest.mark.parametrize("weighted", ["not", "as one", "each"])
def test_a_gram_is_whole_and_symmetric(width, weighted):
    x = draw(SHORT + 3, width, 0).bfloat16()
    rng = torch.Generator().manual_seed(1)
    rows = {"not": 0, "as one": 1, "each": x.shape[0]}[weighted]
    weights = torch.rand(rows, 1, generator=rng, dtype=torch.float64) if rows else None
    first = torch.eye(width, dtype=torch.float64)
    total = first.clone()
    add_gram(total, x, 3, weights)
    wide = x.double() if weights is None else x.double() * weights
    # A BLAS may add up in float32 one after the other.
    torch.testing.assert_close(total, first + x.double().T @ wide, rtol=1e-5, atol=0)
    assert torch.equal(total, total.T)


def test_few_sums_are_held_at_a_time(monkeypatch):
    left, right = draw(5 * SHORT + 7, 4, 0), draw(5 * SHORT + 7, 6, 1).bfloat16()
    whole = product(left, right, terms=2)
    monkeypatch.setattr(long_sums, "HELD", 2 * 4 * 6)
    torch.testing.assert_close(product(left, right, terms=2), whole, rtol=1e-7, atol=0)


def test_terms_are_eight_bits_each():
    left, right = torch.full((4, 1), 1.0 + 2.0**-12 + 2.0**-20), torch.ones(4, 1).bfloat16()
    sums = [float(product(left, right, terms)) for terms in (1, 2, 3)]
    assert sums == [4.0, 4.0 * (1 + 2.0**-12), 4.0 * (1 + 2.0**-12 + 2.0**-20)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 100, 5000])
def test_a_gpu_makes_the_same_terms(width, dtype):
    from moemerge.kernels.triton_sums import weighted_terms

    rows, weights = draw(300, width, 0).to(dtype), draw(300, 1, 1) / 30
    want = rows.double() * weights.double()
    for terms in (1, 2, 3):
        got = weighted_terms(rows.cuda(), weights.cuda(), terms).cpu()
        assert got.shape == (terms, 300, width)
        assert torch.equal(got[0], split(rows.float() * weights, 1)[0])
        # Products are not rounded to float32 on the way, so the last term may differ from ours.
        assert float(((got.double().sum(dim=0) - want) / want).abs().max()) < 2.0 ** (-8 * terms)
    right = draw(300, 7, 2).bfloat16()
    there = product(rows.cuda(), right.cuda(), terms=3, weights=weights.cuda()).cpu()
    torch.testing.assert_close(there, want.T @ right.double(), rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (64, 300, 1000), (2, 0, 4), (0, 4, 4)])
def test_a_gpu_adds_up_in_float64(shape):
    from moemerge.kernels.triton_sums import add_up

    parts = 1e4 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    total = torch.full(shape[1:], 1.0, dtype=torch.float64)
    want = total + parts.double().sum(dim=0)
    there = total.cuda()
    add_up(there, parts.cuda())
    torch.testing.assert_close(there.cpu(), want, rtol=1e-14, atol=0)
    wider = torch.full((shape[1], shape[2] + 3), 1.0, dtype=torch.float64).cuda()
    add_up(wider[:, 2:-1], parts.cuda())
    torch.testing.assert_close(wider[:, 2:-1].cpu(), want, rtol=1e-14, atol=0)
    assert bool((wider[:, [0, 1, -1]] == 1.0).all())


@pytest.mark.parametrize(("terms", "bits"), [(1, 8), (2, 16), (3, 24)])
def test_each_term_adds_eight_bits(terms, bits):
    torch.manual_seed(0)
    values = torch.randn(500, dtype=torch.float64) * torch.logspace(-20, 20, 500)
    parts = split(values, terms)
    assert parts.shape == (terms, 500)
    assert parts.dtype is torch.bfloat16
    error = (parts.double().sum(0) - values).abs() / values.abs()
    assert float(error.max()) <= 2.0**-bits
    assert torch.equal(representable(values, terms), parts.double().sum(0))


def test_three_terms_hold_a_float32_whole():
    torch.manual_seed(0)
    values = torch.randn(1000)
    assert torch.equal(split(values, 3).double().sum(0).float(), values)


CUDA = torch.device("cuda")


@pytest.fixture
def untried():
    availability._tried.cache_clear()
    yield
    availability._tried.cache_clear()


def test_a_triton_that_cannot_compile_is_left_out_and_told(untried, tmp_path, monkeypatch, caplog):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(
        "raise RuntimeError('Failed to find C compiler. Please specify via CC')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("triton", "moemerge.kernels.experts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with caplog.at_level(logging.WARNING):
        assert not availability.triton_works(CUDA)
        assert not availability.triton_works(CUDA)
    assert [record.message for record in caplog.records] == [
        "Triton cannot compile here; plain torch is used, which is slower "
        "(RuntimeError: Failed to find C compiler. Please specify via CC)"
    ]


def test_a_variable_turns_the_kernels_off(untried, monkeypatch):
    monkeypatch.setenv("MOEMERGE_TRITON", "0")
    monkeypatch.setattr(availability, "find_spec", lambda name: pytest.fail("looked for triton"))
    assert not availability.triton_works(CUDA)


@pytest.mark.gpu
def test_it_works_on_a_gpu(untried):
    assert availability.triton_works(CUDA)


def test_threads_launch_one_after_the_other():
    running, most = [], []

    class Kernel:
        def __getitem__(self, grid):
            def run(x, **options):
                running.append(x)
                time.sleep(0.01)
                most.append(len(running))
                running.pop()

            return run

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(availability.launch, Kernel(), (1,), torch.zeros(1), BLOCK=1)
    assert most == [1] * 4
