"""A Triton kernel that compares two routers' softmax choices; `agreement` launches it."""
# No types reach through triton's decorators:
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-untyped-calls=False
# mypy: disallow-incomplete-defs=False

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def _log_softmax(z, inside):
    z = tl.where(inside, z, -float("inf"))
    shifted = z - tl.max(z, axis=1)[:, None]
    return shifted - tl.log(tl.sum(tl.exp(shifted), axis=1))[:, None]


@triton.jit
def _best(z, experts, inside, TOP_K: tl.constexpr):
    """The TOP_K largest of each row as a mask of ones."""
    rest = tl.where(inside, z, -float("inf"))
    chosen = tl.zeros_like(inside.to(tl.int32))
    for _ in tl.range(0, TOP_K):
        best = (experts[None, :] == tl.argmax(rest, axis=1)[:, None]) & inside
        chosen += best.to(tl.int32)
        rest = tl.where(best, -float("inf"), rest)
    return chosen


@triton.jit(do_not_specialize=["n"])
def agreement_kernel(
    target_ptr,  # (n, K) float32 logits
    logits_ptr,  # (n, K) float32
    sums_ptr,  # (programs, 8) float64
    loads_ptr,  # (programs, 2, BK) int32
    n,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    SMALL: tl.constexpr,
    MODERATE: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """What `routing.measure` adds up, of BT tokens, in float64."""
    program = tl.program_id(0)
    rows = program * BT + tl.arange(0, BT)
    experts = tl.arange(0, BK)
    inside = (rows < n)[:, None] & (experts < K)[None, :]
    valid = (experts < K)[None, :] & (rows >= 0)[:, None]
    place = rows.to(tl.int64)[:, None] * K + experts[None, :]
    target = tl.load(target_ptr + place, mask=inside, other=0.0)
    logits = tl.load(logits_ptr + place, mask=inside, other=0.0)
    wanted, made = _best(target, experts, inside, TOP_K), _best(logits, experts, inside, TOP_K)
    same = tl.argmax(tl.where(valid, target, -float("inf")), axis=1) == tl.argmax(
        tl.where(valid, logits, -float("inf")), axis=1
    )
    t, z = target.to(tl.float64), logits.to(tl.float64)
    log_r, log_p = _log_softmax(t, valid), _log_softmax(z, valid)
    r = tl.exp(log_r)
    there = rows < n
    count = there.to(tl.float64)
    kl = tl.sum(tl.where(inside, r * (log_r - log_p), 0.0), axis=1)
    gap = z - t
    first = tl.sum(r * gap, axis=1)
    quadratic = 0.5 * (tl.sum(r * gap * gap, axis=1) - first * first)
    norm = tl.maximum(tl.sqrt(tl.sum(t * t, axis=1)), 2.2250738585072014e-308)
    shift = tl.sqrt(tl.sum(gap * gap, axis=1)) / norm
    hits = tl.sum(wanted * made, axis=1)
    missed = (1.0 - hits.to(tl.float64) / TOP_K) * count
    out = sums_ptr + program * 8
    tl.store(out, tl.sum(kl))
    tl.store(out + 1, tl.sum(quadratic * count))
    tl.store(out + 2, tl.sum(missed))
    tl.store(out + 3, tl.sum(((hits < TOP_K) & there).to(tl.float64)))
    tl.store(out + 4, tl.sum((same & there).to(tl.float64)))
    tl.store(out + 5, tl.sum(shift * count))
    tl.store(out + 6, tl.sum(((shift < SMALL) & there).to(tl.float64)))
    tl.store(out + 7, tl.sum(((shift < MODERATE) & there).to(tl.float64)))
    tl.store(loads_ptr + program * 2 * BK + experts, tl.sum(wanted, axis=0))
    tl.store(loads_ptr + (program * 2 + 1) * BK + experts, tl.sum(made, axis=0))
