"""Rows times their weights as bf16 terms, in one pass over them."""
# No types reach through triton's decorators:
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

WARPS = 8
BLOCK = 4096  # values that a program takes at a time


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
    """Terms of rows (n, width) times weights (n, 1) float32: (terms, n, width) bf16."""
    rows = rows.contiguous()
    count, width = rows.shape
    out = torch.empty(terms, count, width, dtype=torch.bfloat16, device=rows.device)
    if rows.numel():
        with torch.cuda.device(rows.device):
            _terms[(count,)](
                rows, weights.contiguous(), out, width, rows.numel(),
                TERMS=terms, BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=WARPS,
            )  # fmt: skip
    return out
