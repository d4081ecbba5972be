"""Accurate sums over very many tokens on a GPU.

Products of bf16 terms are exact. They are summed in float32 over a few hundred tokens, and in
float64 beyond. Tensor cores truncate float32 sums, which is harmless over a few hundred tokens, but
not over a million with a non-zero mean. float64 throughout has a tenth of their speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemerge.kernels.availability import triton_works
from moemerge.kernels.splitting import split

# Tokens that are summed in float32. A Gram matrix's relative error, 1e-6, grows with them.
SHORT = 512
# Values of such sums that are in memory at a time.
HELD = 2**29
# Columns of a Gram matrix that are computed together; only blocks above the diagonal are.
COLUMNS = 512
# For fewer tokens, float64 is as fast.
WORTH_IT = 4096


def serves(right: Tensor) -> bool:
    """Return whether to use these sums for inputs (tokens, in)."""
    return right.is_cuda and right.dtype == torch.bfloat16 and right.shape[0] >= WORTH_IT


def add_product(
    total: Tensor, left: Tensor, right: Tensor, terms: int, weights: Tensor | None = None
) -> None:
    """total (m, k) float64 += Σ w left rightᵀ of left (tokens, m) and right (tokens, k) in bf16.

    `weights` are (tokens, 1), or (1, 1) for all tokens; None means 1. A `left` in bf16 is used
    unchanged; any other is split into `terms` of eight bits.
    """
    if weights is not None and weights.shape[0] == 1:  # one weight for all tokens needs no rounding
        own = torch.zeros_like(total)
        add_product(own, left, right, terms)
        total.addcmul_(own, weights)
        return
    _add_terms(total, _terms(left, weights, terms), right)


def add_gram(total: Tensor, x: Tensor, terms: int, weights: Tensor | None = None) -> None:
    """total (k, k) float64 += Σ w x xᵀ of x (tokens, k) in bf16. `total` must be symmetric.

    Only blocks above the diagonal are computed, and then mirrored.
    """
    if weights is not None and weights.shape[0] == 1:
        own = torch.zeros_like(total)
        add_gram(own, x, terms)
        total.addcmul_(own, weights)
        return
    parts, width = _terms(x, weights, terms), x.shape[1]
    for begin in range(0, width, COLUMNS):
        end = min(begin + COLUMNS, width)
        _add_terms(total[:end, begin:end], parts[:, :, :end], x[:, begin:end])
        total[begin:end, :begin] = total[:begin, begin:end].T
        square = total[begin:end, begin:end]  # terms of one side only make it slightly asymmetric
        square.copy_(0.5 * (square + square.T))


def _add_terms(total: Tensor, parts: Tensor, right: Tensor) -> None:
    """total (m, k) += Σ parts rightᵀ of parts (terms, tokens, m), the largest first."""
    m, k = total.shape
    tokens = right.shape[0]
    at_once = SHORT * max(1, HELD // (m * k))
    for begin in range(0, tokens, at_once):
        rows = slice(begin, min(begin + at_once, tokens))
        _add_short(total, parts[0, rows], right[rows])
        for part in parts[1:]:  # so small that their summation error does not matter
            total += _product(part[rows].T, right[rows])


def _terms(left: Tensor, weights: Tensor | None, terms: int) -> Tensor:
    """Return `left` times its weights in terms, (terms, tokens, m) bf16."""
    if weights is None and left.dtype == torch.bfloat16:
        return left.unsqueeze(0)
    if weights is None:
        weights = torch.ones(left.shape[0], 1, device=left.device)
    if left.is_cuda and triton_works(left.device):
        from moemerge.kernels.triton_sums import weighted_terms

        return weighted_terms(left, weights.float(), terms)
    return split(left.float() * weights.float(), terms)


def _add_short(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right, with a float32 sum for every SHORT tokens."""
    whole = left.shape[0] // SHORT * SHORT
    if whole:
        high, other = (_in_groups(x[:whole]) for x in (left, right))
        add_up(out, _product(high.mT, other))
    if whole < left.shape[0]:
        out += _product(left[whole:].T, right[whole:])


def _in_groups(x: Tensor) -> Tensor:
    """Return a view of x (tokens, m) as (groups, SHORT, m)."""
    row, column = x.stride()
    shape = (x.shape[0] // SHORT, SHORT, x.shape[1])
    return x.as_strided(shape, (SHORT * row, row, column), x.storage_offset())


def add_up(out: Tensor, parts: Tensor) -> None:
    """out (m, k) += the sum of parts (n, m, k), in float64."""
    if out.is_cuda and triton_works(out.device):
        from moemerge.kernels import triton_sums

        triton_sums.add_up(out, parts)
    else:
        out += parts.sum(dim=0, dtype=torch.float64)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left right in float32, for one pair of bf16 matrices or a batch of them."""
    if not left.is_cuda:  # in tests only
        return left.float() @ right.float()
    multiply = torch.bmm if left.dim() == 3 else torch.mm
    result: Tensor = multiply(left, right, out_dtype=torch.float32)
    return result
