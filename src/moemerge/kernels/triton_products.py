"""Triton kernels for products with bf16 features; `fused` launches them.

Tensor cores truncate when they accumulate, which shrinks a long sum by about 1e-8 with every step.
They therefore sum over short stretches only, which are added in registers with rounding. Exceptions
are the logits of one term, which need less accuracy, and third terms, which are small.

Tensors may also hold bf16 values in float32, since Triton's interpreter cannot multiply bf16.
"""
# No types reach through triton's decorators:
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def _token_weights(
    diagonal_ptr, rank_one_ptr, rows, experts, n, K: tl.constexpr, WEIGHTS: tl.constexpr
):
    """Load H's two parts for some tokens; 0 beyond the last token or expert."""
    place = rows.to(tl.int64)[:, None] * K + experts[None, :]
    inside = (rows < n)[:, None] & (experts < K)[None, :]
    diagonal = inside.to(tl.float32)
    if WEIGHTS != "identity":
        diagonal = tl.load(diagonal_ptr + place, mask=inside, other=0.0)
    rank_one = diagonal
    if WEIGHTS == "rank_one":
        rank_one = tl.load(rank_one_ptr + place, mask=inside, other=0.0)
    return diagonal, rank_one


@triton.jit
def _weighted(z, diagonal, rank_one, WEIGHTS: tl.constexpr):
    """Return H z of each row: diagonal ⊙ z − rank_one (rank_one · z)."""
    u = diagonal * z
    if WEIGHTS == "softmax" or WEIGHTS == "rank_one":
        u -= rank_one * tl.sum(rank_one * z, axis=1)[:, None]
    return u


@triton.jit
def _store_terms(
    u, u_ptr, rows, experts, n, BK: tl.constexpr, BM: tl.constexpr, TERMS: tl.constexpr
):
    """Store u as a sum of bf16 terms.

    A row holds the first terms of BM experts, their second terms, ..., then the next BM experts.
    """
    column = experts // BM * (TERMS * BM) + experts % BM
    place = rows.to(tl.int64)[:, None] * (TERMS * BK) + column[None, :]
    inside = (rows < n)[:, None]
    rest = u
    for term in tl.static_range(TERMS):
        part = rest.to(tl.bfloat16)
        tl.store(u_ptr + place + term * BM, part.to(u_ptr.dtype.element_ty), mask=inside)
        rest -= part.to(tl.float32)


@triton.jit
def split_kernel(
    v_ptr,  # (K, columns) float64
    out_ptr,  # (TERMS, rows, width) bf16
    bias_ptr,  # (rows,) float32
    width,
    columns,
    K: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split a row of V into terms (zeros beyond the last expert), and store its bias column."""
    expert, rows = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    given = v_ptr + expert * columns
    rest = tl.load(given + column, mask=inside & (expert < K), other=0.0)
    for term in tl.static_range(TERMS):
        part = rest.to(tl.float32).to(tl.bfloat16)
        place = (term * rows + expert) * width + column
        tl.store(out_ptr + place, part.to(out_ptr.dtype.element_ty), mask=inside)
        rest -= part.to(tl.float64)
    if tl.program_id(1) == 0:
        bias = tl.load(given + width, mask=(columns > width) & (expert < K), other=0.0)
        tl.store(bias_ptr + expert, bias.to(tl.float32))


@triton.jit
def _logits_by_blocks(
    x_desc,
    v_desc,
    row,
    first,
    d,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    TERMS: tl.constexpr,
    CHAINED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Return X Vᵀ, (BT, BK): each block of d starts from zero and is added with rounding."""
    z = tl.zeros((BT, BK), dtype=tl.float32)
    third = tl.zeros((BT, BK), dtype=tl.float32)
    for k in tl.range(0, d, BD):
        x = x_desc.load([row, k])
        part = tl.zeros((BT, BK), dtype=tl.float32)
        for back in tl.static_range(CHAINED):  # the smallest term first
            v = v_desc.load([(CHAINED - 1 - back) * PADDED + first, k])
            part = tl.dot(x, v.T, part)
        for term in tl.static_range(CHAINED, TERMS):
            v = v_desc.load([term * PADDED + first, k])
            third = tl.dot(x, v.T, third)
        z += part
    return z + third


@triton.jit
def _logits_at_once(
    x_desc, v_desc, row, first, d, BT: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr
):
    """Return X Vᵀ of one term, (BT, BK); the tensor cores sum over all of d."""
    z = tl.zeros((BT, BK), dtype=tl.float32)
    for k in tl.range(0, d, BD):
        x = x_desc.load([row, k])
        v = v_desc.load([first, k])
        z = tl.dot(x, v.T, z)
    return z


@triton.jit(do_not_specialize=["n"])
def logits_kernel(
    x_desc,  # (n, d) features
    v_desc,  # (V_TERMS·PADDED, d): all experts' first terms, then their second ones, ...
    bias_ptr,  # (PADDED,) float32
    diagonal_ptr,  # (n, K) float32
    rank_one_ptr,  # (n, K) float32
    u_ptr,  # (n, TERMS·BK) bf16, or (n, K) float32 logits
    sums_ptr,  # (tiles, BK) float32: Σ u of a tile's rows
    n,
    d,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    V_TERMS: tl.constexpr,
    CHAINED: tl.constexpr,  # terms of V in the same sum
    TERMS: tl.constexpr,
    PADDED: tl.constexpr,
    WEIGHTS: tl.constexpr,  # "logits" stores z itself; else H z is split and stored
    EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """z = X Vᵀ (+ bias) of BT tokens, weighted by H and split into terms."""
    tile = tl.program_id(0)
    row = tile * BT
    first = tl.program_id(1) * BK
    experts = first + tl.arange(0, BK)
    rows = row + tl.arange(0, BT)
    if EARLY:  # loaded while the logits are computed
        diagonal, rank_one = _token_weights(
            diagonal_ptr, rank_one_ptr, rows, experts, n, K, WEIGHTS
        )
    if V_TERMS == 1:
        z = _logits_at_once(x_desc, v_desc, row, first, d, BT, BK, BD)
    else:
        z = _logits_by_blocks(x_desc, v_desc, row, first, d, BT, BK, BD, V_TERMS, CHAINED, PADDED)
    if HAS_BIAS:
        z += tl.load(bias_ptr + experts)[None, :]
    if WEIGHTS == "logits":
        inside = (rows < n)[:, None] & (experts < K)[None, :]
        tl.store(u_ptr + rows.to(tl.int64)[:, None] * K + experts[None, :], z, mask=inside)
    else:
        if not EARLY:
            diagonal, rank_one = _token_weights(
                diagonal_ptr, rank_one_ptr, rows, experts, n, K, WEIGHTS
            )
        u = _weighted(z, diagonal, rank_one, WEIGHTS)
        if HAS_BIAS:
            tl.store(sums_ptr + tile * BK + experts, tl.sum(u, axis=0))
        _store_terms(u, u_ptr, rows, experts, n, BK, BM, TERMS)


@triton.jit
def _add_dot(a, b, total, TERMS: tl.constexpr, WIDE: tl.constexpr):
    """total + a b of float32 tiles, each in TERMS (2 or 3) bf16 terms, the smallest products first.

    WIDE: the terms are held in float32, for the interpreter.
    """
    held: tl.constexpr = tl.float32 if WIDE else tl.bfloat16
    a0 = a.to(tl.bfloat16)
    a1 = (a - a0.to(tl.float32)).to(tl.bfloat16)
    b0 = b.to(tl.bfloat16)
    b1 = (b - b0.to(tl.float32)).to(tl.bfloat16)
    if TERMS == 3:
        a2 = (a - a0.to(tl.float32) - a1.to(tl.float32)).to(tl.bfloat16)
        b2 = (b - b0.to(tl.float32) - b1.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(a2.to(held), b0.to(held), total)
        total = tl.dot(a0.to(held), b2.to(held), total)
        total = tl.dot(a1.to(held), b1.to(held), total)
    total = tl.dot(a1.to(held), b0.to(held), total)
    total = tl.dot(a0.to(held), b1.to(held), total)
    return tl.dot(a0.to(held), b0.to(held), total)


@triton.jit(do_not_specialize=["n"])
def weigh_kernel(
    z_ptr,  # (n, K) float32
    diagonal_ptr,
    rank_one_ptr,
    projected_ptr,  # (n, J) float32
    shift_ptr,  # (K, J) float32
    u_ptr,  # (n, TERMS·BK) bf16
    sums_ptr,  # (tiles, BK) float32
    n,
    K: tl.constexpr,
    J: tl.constexpr,  # 0: no shift
    BT: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
    BJ: tl.constexpr,
    TERMS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Split H z into terms, from z in memory.

    For more experts than one tile of logits holds, and for logits that `shift` · projected moves.
    """
    tile = tl.program_id(0)
    rows = tile * BT + tl.arange(0, BT)
    experts = tl.arange(0, BK)
    inside = (rows < n)[:, None] & (experts < K)[None, :]
    z = tl.load(z_ptr + rows.to(tl.int64)[:, None] * K + experts[None, :], mask=inside, other=0.0)
    if J > 0:
        j = tl.arange(0, BJ)
        projected = _projected(projected_ptr, rows, j, n, J)
        shift = tl.load(
            shift_ptr + experts[None, :] * J + j[:, None],
            mask=(j < J)[:, None] & (experts < K)[None, :],
            other=0.0,
        )
        z = _add_dot(projected, shift, z, 3, WIDE)
    diagonal, rank_one = _token_weights(diagonal_ptr, rank_one_ptr, rows, experts, n, K, WEIGHTS)
    u = _weighted(z, diagonal, rank_one, WEIGHTS)
    tl.store(sums_ptr + tile * BK + experts, tl.sum(u, axis=0))
    _store_terms(u, u_ptr, rows, experts, n, BK, BM, TERMS)


@triton.jit
def _projected(projected_ptr, rows, j, n, J: tl.constexpr):
    """Load some tokens' coordinates along the J directions; 0 beyond the last."""
    return tl.load(
        projected_ptr + rows.to(tl.int64)[:, None] * J + j[None, :],
        mask=(rows < n)[:, None] & (j < J)[None, :],
        other=0.0,
    )


@triton.jit(do_not_specialize=["n", "rows_per_split"])
def moment_kernel(
    z_ptr,  # (n, K) float32
    diagonal_ptr,
    rank_one_ptr,
    projected_ptr,  # (n, J) float32
    out_ptr,  # (splits, BK, BJ) float32
    n,
    rows_per_split,  # a multiple of BT
    K: tl.constexpr,
    J: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BJ: tl.constexpr,
    WEIGHTS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute Σ_t (H_t z_t) projected_tᵀ over one split's rows."""
    split = tl.program_id(0)
    experts = tl.arange(0, BK)
    j = tl.arange(0, BJ)
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, n)
    total = tl.zeros((BK, BJ), dtype=tl.float32)
    for row in tl.range(begin, end, BT):
        rows = row + tl.arange(0, BT)
        inside = (rows < n)[:, None] & (experts < K)[None, :]
        place = rows.to(tl.int64)[:, None] * K + experts[None, :]
        z = tl.load(z_ptr + place, mask=inside, other=0.0)
        diagonal, rank_one = _token_weights(
            diagonal_ptr, rank_one_ptr, rows, experts, n, K, WEIGHTS
        )
        u = _weighted(z, diagonal, rank_one, WEIGHTS)
        projected = _projected(projected_ptr, rows, j, n, J)
        part = tl.zeros((BK, BJ), dtype=tl.float32)
        total += _add_dot(tl.trans(u), projected, part, 2, WIDE)
    place = (split.to(tl.int64) * BK + experts)[:, None] * BJ + j[None, :]
    tl.store(out_ptr + place, total)


@triton.jit
def _outer_by_blocks(
    u_desc,
    x_desc,
    begin,
    end,
    group,
    column,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    TERMS: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """Return Σ u xᵀ over rows begin...end, (BM, BN)."""
    total = tl.zeros((BM, BN), dtype=tl.float32)
    third = tl.zeros((BM, BN), dtype=tl.float32)
    for row in tl.range(begin, end, BT):
        x = x_desc.load([row, column])
        part = tl.zeros((BM, BN), dtype=tl.float32)
        if SQUARE:  # x² has 16 significant bits, which two terms hold exactly
            wide = x.to(tl.float32)
            square = wide * wide
            x = square.to(tl.bfloat16).to(x_desc.dtype)
            rest = (square - x.to(tl.float32)).to(tl.bfloat16).to(x_desc.dtype)
            u = u_desc.load([row, group * TERMS * BM])
            part = tl.dot(u.T, rest, part)
        for back in tl.static_range(2):
            u = u_desc.load([row, (group * TERMS + 1 - back) * BM])
            part = tl.dot(u.T, x, part)
        if TERMS == 3:
            u = u_desc.load([row, (group * TERMS + 2) * BM])
            third = tl.dot(u.T, x, third)
        total += part
    return total + third


@triton.jit
def _outer_stacked(
    u_desc,
    x_desc,
    begin,
    end,
    group,
    column,
    BT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STRETCH: tl.constexpr,
):
    """Return Σ u xᵀ with two terms stacked in one product, STRETCH blocks at a time."""
    both = tl.zeros((2 * BM, BN), dtype=tl.float32)
    part = tl.zeros((2 * BM, BN), dtype=tl.float32)
    for row in tl.range(begin, end, BT):
        x = x_desc.load([row, column])
        u = u_desc.load([row, group * 2 * BM])
        part = tl.dot(u.T, x, part)
        if (row // BT) % STRETCH == STRETCH - 1:
            both += part
            part = tl.zeros((2 * BM, BN), dtype=tl.float32)
    both += part
    high, low = tl.split(tl.permute(tl.reshape(both, (2, BM, BN)), (1, 2, 0)))
    return high + low


@triton.jit(do_not_specialize=["n", "rows_per_split"])
def outer_kernel(
    u_desc,  # (n, TERMS·BK) bf16
    x_desc,  # (n, d) features
    out_ptr,  # (splits, BK, d) float32
    n,
    d,
    rows_per_split,  # a multiple of BT
    BT: tl.constexpr,
    BM: tl.constexpr,  # experts of one program; divides BK
    BN: tl.constexpr,  # columns of one program
    BK: tl.constexpr,
    TERMS: tl.constexpr,
    STACKED: tl.constexpr,
    STRETCH: tl.constexpr,
    SQUARE: tl.constexpr,
):
    """Compute Σ_t u_tᵀ x_t over one split's rows (x_t² with SQUARE).

    The last split comes first: its rows may still be in the cache from the previous pass.
    """
    split = tl.num_programs(2) - 1 - tl.program_id(2)
    column = tl.program_id(0) * BN
    group = tl.program_id(1)
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, n)
    if STACKED:
        total = _outer_stacked(u_desc, x_desc, begin, end, group, column, BT, BM, BN, STRETCH)
    else:
        total = _outer_by_blocks(
            u_desc, x_desc, begin, end, group, column, BT, BM, BN, TERMS, SQUARE
        )
    experts = group * BM + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    place = (split.to(tl.int64) * BK + experts)[:, None] * d + columns[None, :]
    tl.store(out_ptr + place, total, mask=(columns < d)[None, :])


@triton.jit(do_not_specialize=["splits"])
def add_up_kernel(
    partial_ptr,  # (splits, BK, d) float32
    out_ptr,  # (K, columns) float64
    splits,
    d,
    columns,
    factor: tl.float64,
    BK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add `factor` times the sum over splits, in float64, to one expert's row of `out`."""
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < d
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    part = partial_ptr + expert * d + column
    for _ in tl.range(splits):
        total += tl.load(part, mask=inside, other=0.0).to(tl.float64)
        part += BK * d
    there = out_ptr + expert * columns + column
    tl.store(there, tl.load(there, mask=inside) + factor * total, mask=inside)
