"""Rotary position embeddings on a GPU: one read and one write where plain torch takes eight."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moemerge.kernels.availability import triton_works

MOST_VALUES = 2**15  # of one token: a program holds them all


def usable(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel serves queries and keys (batch, heads, tokens, D), turned in full."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, cos, sin))
    return (
        not learns  # the kernel has no way back
        and q.is_cuda
        and all(_fits(x, cos) for x in (q, k))
        and cos.shape == sin.shape
        and all(x.dtype == torch.bfloat16 for x in (q, k, cos, sin))
        and triton_works(q.device)
    )


def fits(heads: int, width: int) -> bool:
    """Whether the kernel takes so many heads of this width."""
    return width % 2 == 0 and heads * width <= MOST_VALUES


def _fits(x: Tensor, cos: Tensor) -> bool:
    if x.dim() != 4 or cos.dim() != 3 or x.numel() == 0:
        return False
    batch, heads, tokens, width = x.shape
    return (
        cos.shape in ((batch, tokens, width), (1, tokens, width))
        and fits(heads, width)
        and x.stride(3) == 1
        and _is_dense(x)
    )


def _is_dense(x: Tensor) -> bool:
    """Whether x fills its memory, so that a result of the same strides has room for it."""
    return bool(torch.empty_like(x, device="meta").stride() == x.stride())


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both turned by their positions, bit for bit as torch does it step by step."""
    angles = cos.contiguous(), sin.contiguous()
    return _turned(q, *angles), _turned(k, *angles)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, heads, tokens, width = x.shape
    out = torch.empty_like(x)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _kernels().rotary_kernel[(batch * tokens,)](
            x,
            cos,
            sin,
            out,
            tokens,
            0 if cos.shape[0] == 1 else cos.stride(0),
            *x.stride()[:3],
            HEADS=heads,
            HALF=width // 2,
            BH=_power_of_two(heads),
            BD=_power_of_two(width // 2),
        )
    return out


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@cache
def _kernels() -> Any:
    from moemerge.kernels import triton_rotary

    return triton_rotary
