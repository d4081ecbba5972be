"""The kernel against plain torch, bit for bit, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from moemerge.kernels.rotary import rotary, usable

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"


def turned(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def normal(*shape):
    return torch.randn(*shape).to(DEVICE, torch.bfloat16)


def layout(x):
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED),
    reason="needs a CUDA device, or triton and TRITON_INTERPRET=1",
)
@pytest.mark.parametrize(
    ("batch", "angles", "tokens", "heads", "kept", "width"),
    [
        (2, 2, 9, 4, 2, 16),
        (3, 1, 5, 3, 1, 24),
        (1, 1, 1, 1, 1, 2),
        (2, 1, 33, 16, 16, 128),
        (1, 1, 8, 32, 4, 64),
    ],
)
@pytest.mark.parametrize("heads_first", [True, False])
def test_queries_and_keys_are_those_of_plain_torch(
    batch: int, angles: int, tokens: int, heads: int, kept: int, width: int, heads_first: bool
) -> None:
    torch.manual_seed(tokens)

    def states(count: int) -> torch.Tensor:
        if heads_first:
            return normal(batch, count, tokens, width)
        return normal(batch, tokens, count, width).transpose(1, 2)

    q, k = states(heads), states(kept)
    cos, sin = normal(angles, tokens, width), normal(angles, tokens, width)
    if DEVICE == "cuda":
        assert usable(q, k, cos, sin)
    for made, x in zip(rotary(q, k, cos, sin), (q, k), strict=True):
        plain = turned(x, cos, sin)
        if INTERPRETED:  # which cuts the sum off where a GPU rounds: the products are rounded
            torch.testing.assert_close(made, plain, rtol=2.0**-7, atol=0.0)
        else:
            assert torch.equal(made, plain)
        assert layout(made) == layout(plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_the_kernel_does_not_serve() -> None:
    q, k = normal(2, 4, 9, 16), normal(2, 2, 9, 16)
    cos, sin = normal(2, 9, 16), normal(2, 9, 16)
    assert usable(q, k, cos, sin)
    assert not usable(q, k, cos[..., :8], sin[..., :8])  # turned in part
    assert not usable(q, k, cos.float(), sin.float())
    assert not usable(q[..., ::2], k[..., ::2], cos[..., ::2], sin[..., ::2])
    assert not usable(q, k, cos[:, :4], sin[:, :4])
    assert not usable(q[:, :0], k, cos, sin)
    assert not usable(q.requires_grad_(), k, cos, sin)


def test_a_cpu_is_served_by_plain_torch() -> None:
    x, angles = torch.zeros(1, 1, 1, 2).bfloat16(), torch.zeros(1, 1, 2).bfloat16()
    assert not usable(x, x, angles, angles)
