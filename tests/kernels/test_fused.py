"""The kernels against dense float64 twins.

On a GPU as they are; elsewhere under Triton's interpreter, where it is installed and asked for by
TRITON_INTERPRET=1 (it cannot multiply bf16: the same numbers are held in float32).
"""

import os
from importlib.util import find_spec

import pytest
import torch

from kernels import twins
from kernels.twins import error, wide
from moemerge.kernels import fused
from moemerge.kernels.splitting import ACCURATE, COARSE, FAST, representable

ON_GPU = torch.cuda.is_available()
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(
    not (ON_GPU or INTERPRETED), reason="needs a CUDA device, or triton and TRITON_INTERPRET=1"
)
DEVICE = "cuda" if ON_GPU and not INTERPRETED else "cpu"
# The interpreter cuts bits off where the GPU rounds to nearest.
TOLERANCE = {2: 1e-5 if ON_GPU else 4e-5, 3: 3e-7}
# Sums over the longest rows round a little more often.
WIDEST, SLACK = 8192, 1.5
SHAPES = [  # tokens, d, experts, bias
    (100, 136, 12, True),
    (1, 512, 8, False),
    (700, 64, 64, True),
    (40, 72, 130, True),
]
LARGE = [
    (5000, 2048, 64, False),
    (3001, 2880, 32, True),
    (2049, 4096, 128, False),
    (1000, 8192, 512, True),
    (70_000, 512, 160, False),
]
each_shape = pytest.mark.parametrize("shape", SHAPES + (LARGE if ON_GPU else []))
each_kind = pytest.mark.parametrize("kind", twins.KINDS)
each_terms = pytest.mark.parametrize("terms", [2, 3])


def features(tokens, width):
    x = torch.randn(tokens, width, device=DEVICE).bfloat16()
    return x if DEVICE == "cuda" else x.float()


def product(x, h, v, terms):
    out = torch.zeros_like(v)
    fused.add_product(out, x, *h, v, terms=terms)
    return out


def bound(terms, width):
    return TOLERANCE[terms] * (SLACK if width == WIDEST else 1.0)


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("terms", [COARSE, FAST, ACCURATE], ids=str)
@each_kind
@each_shape
def test_product_equals_its_dense_twin(shape, kind, terms):
    tokens, width, experts, bias = shape
    torch.manual_seed(tokens)
    x, h = features(tokens, width), twins.weights(kind, tokens, experts, DEVICE)
    v = torch.randn(experts, width + bias, device=DEVICE, dtype=torch.float64)
    if terms is not ACCURATE:
        v = representable(v, terms.vector)
    got = product(x, h, v, terms)
    assert error(got, twins.product(x, h, v)) <= bound(terms.weighted, width)


@runs_kernels
@pytest.mark.gpu
@each_terms
@each_shape
def test_logits_and_outer_products(shape, terms):
    tokens, width, experts, bias = shape
    torch.manual_seed(tokens)
    x = features(tokens, width)
    xx = wide(x, bias)
    v = torch.randn(experts, width + bias, device=DEVICE, dtype=torch.float64)
    assert error(fused.logits(x, v, terms=terms), xx @ v.T) <= bound(terms, width)
    u = torch.randn(tokens, experts, device=DEVICE, dtype=torch.float64)
    columns = width + bias
    assert error(fused.outer(u, x, columns, terms=terms), u.T @ xx) <= bound(terms, width)
    h = u.abs()
    squares = fused.outer(h, x, columns, terms=terms, square=True)
    assert error(squares, h.T @ xx**2) <= 4e-5  # both are split in two terms only


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("directions", [3, 32])
@each_kind
@each_shape
def test_a_product_in_halves_with_a_shift_between_them(shape, kind, directions):
    """(y + c Qᵀ) as one router, with the logits of c Qᵀ made from the projected tokens."""
    tokens, width, experts, bias = shape
    torch.manual_seed(tokens)
    x, h = features(tokens, width), twins.weights(kind, tokens, experts, DEVICE)
    y = representable(
        torch.randn(experts, width + bias, device=DEVICE, dtype=torch.float64), COARSE.vector
    )
    q = torch.randn(directions, width + bias, device=DEVICE, dtype=torch.float64)
    c = 10 * torch.randn(experts, directions, device=DEVICE, dtype=torch.float64)
    z = fused.logits(x, y, terms=COARSE.vector)
    xx = wide(x, bias)
    projected = (xx @ q.T).float()
    moment = fused.moment(z, *h, projected, wide=x.dtype == torch.float32)
    assert error(moment, twins.product(x, h, y) @ q.T) <= 10 * TOLERANCE[2]
    out = torch.zeros_like(y)
    fused.add_weighted(out, x, *h, z, fused.Shift(projected, c), terms=COARSE.weighted)
    assert error(out, twins.product(x, h, y + c @ q)) <= 2 * bound(2, width)


@runs_kernels
@pytest.mark.gpu
def test_a_view_of_a_wider_matrix_is_read_in_place():
    torch.manual_seed(0)
    whole = features(90, 192)
    x = whole[10:80, :128]
    v = torch.randn(16, 128, device=DEVICE, dtype=torch.float64)
    want = (x.double() @ v.T).T @ x.double()
    assert error(product(x, (None, None), v, ACCURATE), want) <= TOLERANCE[3]


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_added_to_what_is_there(bias):
    torch.manual_seed(0)
    x, factor = features(70, 64), 1 / 3  # which float32 does not hold
    v = torch.randn(12, 64 + bias, device=DEVICE, dtype=torch.float64)
    start = 1e3 * torch.randn_like(v)
    out = start.clone()
    fused.add_product(out, x, None, None, v, terms=ACCURATE, factor=factor)
    alone = product(x, (None, None), v, ACCURATE)
    torch.testing.assert_close(out, start + factor * alone, rtol=1e-15, atol=1e-12)


def test_sums_go_to_contiguous_float64_alone():
    x, v = torch.zeros(8, 16), torch.zeros(16, 16, dtype=torch.float64)
    for out in (torch.zeros(16, 16), torch.zeros(16, 32, dtype=torch.float64)[:, ::2]):
        with pytest.raises(ValueError, match="not contiguous float64"):
            fused.add_product(out, x, None, None, v, terms=FAST)


@runs_kernels
@pytest.mark.gpu
def test_many_tokens_add_up_in_float64():
    """All terms positive: a float32 sum over all tokens would lose their last digits."""
    if not ON_GPU:
        pytest.skip("too many tokens for the interpreter")
    torch.manual_seed(0)
    x = features(1 << 20, 64).abs()
    v = torch.rand(8, 64, device=DEVICE, dtype=torch.float64)
    want = (x.double() @ v.T).T @ x.double()
    assert error(product(x, (None, None), v, ACCURATE), want) <= TOLERANCE[3]


def test_only_what_the_kernels_can_read_is_theirs():
    x = torch.zeros(8, 64, dtype=torch.bfloat16)
    assert not fused.usable(x)  # on a CPU
    if ON_GPU and find_spec("triton") is not None:
        assert fused.usable(x.cuda())
        assert not fused.usable(x.cuda().float())
        assert not fused.usable(x.cuda().half())
        assert not fused.usable(torch.zeros(8, 65, dtype=torch.bfloat16, device="cuda"))
        assert not fused.usable(x.cuda()[:, 1:])
        assert not fused.usable(x.cuda().T)
