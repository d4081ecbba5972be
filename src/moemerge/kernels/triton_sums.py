"""Triton kernels of `long_sums`: bf16 terms of weighted rows, and sums in float64."""
# No types reach through triton's decorators:
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from moemerge.kernels.availability import launch

WARPS = 8
BLOCK = 4096  # values of a row per program and step
SUMMED, SUMMED_WARPS = 1024, 4  # sums per program


@triton.jit
def _terms(source, weights, target, width, size, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < width
        rest = tl.load(source + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rest = rest * weight
        for term in tl.static_range(TERMS):
            part = rest.to(tl.bfloat16)
            tl.store(target + term * size + row * width + columns, part, mask=inside)
            rest -= part.to(tl.float32)


def weighted_terms(rows: Tensor, weights: Tensor, terms: int) -> Tensor:
    """Return the terms of rows (n, width) times weights (n, 1) float32: (terms, n, width) bf16."""
    rows = rows.contiguous()
    count, width = rows.shape
    out = torch.empty(terms, count, width, dtype=torch.bfloat16, device=rows.device)
    if rows.numel():
        launch(
            _terms, (count,), rows, weights.contiguous(), out, width, rows.numel(),
            TERMS=terms, BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _add_up(parts, total, count, columns, stride, size, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    here = total + places // columns * stride + places % columns
    sums = tl.load(here, mask=inside, other=0.0)
    at = parts + places
    for _ in range(count):
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float64)
        at += size
    tl.store(here, sums, mask=inside)


def add_up(total: Tensor, parts: Tensor) -> None:
    """total (m, k) float64, rows of a larger one perhaps, += the sum of parts (n, m, k) float32.

    `sum` of torch would write all parts in float64 first, which takes four times as long.
    """
    rows, columns = total.shape
    assert columns == 1 or total.stride(1) == 1
    parts = parts.contiguous()
    if parts.numel():
        launch(
            _add_up, (triton.cdiv(total.numel(), SUMMED),),
            parts, total, parts.shape[0], columns, total.stride(0), rows * columns,
            BLOCK=SUMMED, num_warps=SUMMED_WARPS,
        )  # fmt: skip
