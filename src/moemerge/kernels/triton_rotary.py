"""A Triton kernel that turns queries or keys by their positions; `rotary` launches it."""
# No types reach through triton's decorators:
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def _rounded_product(x, y):
    """To bf16, to the nearest and even. By hand: of a conversion and its way back the compiler
    makes nothing at all."""
    product = x.to(tl.float32) * y.to(tl.float32)
    bits = product.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(product == product, bits.to(tl.float32, bitcast=True), product)


@triton.jit(do_not_specialize=["tokens", "batch_of_angles"])
def rotary_kernel(
    x_ptr,  # (batch, heads, tokens, D) bf16 with the strides below
    cos_ptr,  # (batch or 1, tokens, D) bf16
    sin_ptr,
    out_ptr,  # like x
    tokens,
    batch_of_angles,  # distance of two batches' angles; 0: all have the same
    stride_batch,
    stride_head,
    stride_token,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    """x cos + (−x₂, x₁) sin of all heads of one token, rounded to bf16 wherever torch does."""
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    heads, columns = tl.arange(0, BH), tl.arange(0, BD)
    inside = (heads < HEADS)[:, None] & (columns < HALF)[None, :]
    first = batch * stride_batch + token * stride_token + heads[:, None] * stride_head
    first = first + columns[None, :]
    x1 = tl.load(x_ptr + first, mask=inside, other=0.0)
    x2 = tl.load(x_ptr + first + HALF, mask=inside, other=0.0)
    angles = batch * batch_of_angles + token * (2 * HALF) + columns
    there = columns < HALF
    c1 = tl.load(cos_ptr + angles, mask=there, other=0.0)[None, :]
    c2 = tl.load(cos_ptr + angles + HALF, mask=there, other=0.0)[None, :]
    s1 = tl.load(sin_ptr + angles, mask=there, other=0.0)[None, :]
    s2 = tl.load(sin_ptr + angles + HALF, mask=there, other=0.0)[None, :]
    y1 = _rounded_product(x1, c1) - _rounded_product(x2, s1)
    y2 = _rounded_product(x2, c2) + _rounded_product(x1, s2)
    tl.store(out_ptr + first, y1.to(tl.bfloat16), mask=inside)
    tl.store(out_ptr + first + HALF, y2.to(tl.bfloat16), mask=inside)
