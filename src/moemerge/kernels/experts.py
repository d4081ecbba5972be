"""SwiGLU experts on a GPU: grouped products, with fused kernels for the steps between them.

Rounding follows the plain formulation step by step. silu(gate) is rounded, then its product with
up. A row times its weight is rounded if the weight is bf16, too; then rows are summed in float32.
"""
# No types reach through triton's decorators:
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from moemerge.kernels.availability import launch
from moemerge.runtime.torch_compat import grouped_mm

WARPS = 4


@triton.jit
def _gate(source, target, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    begin = source + row * 2 * width
    gate = tl.load(begin + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(begin + width + columns, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(target.dtype.element_ty).to(tl.float32)
    tl.store(target + row * width + columns, active * up, mask=inside)


@triton.jit
def _gather(source, places, target, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    token = tl.load(places + row) // TOP_K
    value = tl.load(source + token * width + columns, mask=inside)
    tl.store(target + row * width + columns, value, mask=inside)


@triton.jit
def _combine(
    source, places, weights, ends, target, width, count,
    TOP_K: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    known = tl.load(ends + count - 1)  # rows beyond have no expert and were not written
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        row = tl.load(places + token * TOP_K + choice)
        weight = tl.load(weights + token * TOP_K + choice).to(tl.float32)
        used = inside & (row < known)
        value = tl.load(source + row * width + columns, mask=used, other=0.0).to(tl.float32)
        part = value * weight
        if ROUND:
            part = part.to(target.dtype.element_ty).to(tl.float32)
        total += part
    tl.store(target + token * width + columns, total, mask=inside)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows [gate up]: (rows, 2 w) -> (rows, w)."""
    rows, both = gate_up.shape
    out = gate_up.new_empty(rows, both // 2)
    if rows:
        block = triton.next_power_of_2(both // 2)
        launch(_gate, (rows,), gate_up, out, both // 2, BLOCK=block, num_warps=WARPS)
    return out


def gathered(x: Tensor, places: Tensor, top_k: int) -> Tensor:
    """Return rows `places // top_k` of x: (tokens, d) -> (len(places), d)."""
    out = x.new_empty(places.shape[0], x.shape[1])
    if places.shape[0]:
        launch(
            _gather, (places.shape[0],), x, places, out, x.shape[1],
            TOP_K=top_k, BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=WARPS,
        )  # fmt: skip
    return out


def combined(rows: Tensor, places: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return each token's sum over k of rows[places[t, k]] weights[t, k], (tokens, d)."""
    tokens, top_k = weights.shape
    out = rows.new_empty(tokens, rows.shape[1])
    if tokens:
        launch(
            _combine, (tokens,), rows, places, weights, ends, out, rows.shape[1], ends.shape[0],
            TOP_K=top_k, ROUND=weights.dtype == rows.dtype,
            BLOCK=triton.next_power_of_2(rows.shape[1]), num_warps=WARPS,
        )  # fmt: skip
    return out


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted outputs of SwiGLU experts.

    x is (tokens, d), chosen and weights (tokens, k), gate_up (experts, 2 w, d), down
    (experts, d, w).
    """
    tokens, top_k = chosen.shape
    count = gate_up.shape[0]
    flat = chosen.reshape(-1)
    ordered, order = torch.sort(flat)  # rows by expert
    edges = torch.arange(1, count + 1, device=x.device, dtype=ordered.dtype)
    ends = torch.searchsorted(ordered, edges).to(torch.int32)  # end of each expert's rows
    places = torch.empty_like(order)
    places[order] = torch.arange(order.shape[0], device=x.device)
    hidden = _grouped(gathered(x, order, top_k), gate_up, ends)
    hidden = gated(hidden)
    hidden = _grouped(hidden, down, ends)
    return combined(hidden, places.reshape(tokens, top_k), weights.contiguous(), ends)


def _grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return each expert's rows times its matrix (experts, out, in): (rows, in) -> (rows, out)."""
    return grouped_mm(rows, weights.transpose(-2, -1), ends)
