"""Sums over very many tokens on a GPU: exact products of bf16 terms, summed in float32 over a few
hundred tokens and in float64 beyond.

Matrix units add products of bf16 numbers up in float32, and cut off what does not fit: harmless
over a few hundred tokens, not over a million with a mean. float64 has a tenth of their speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemerge.kernels.availability import triton_works
from moemerge.kernels.splitting import split

# Tokens that are summed up in float32. The error of a Gram matrix grows with them, from 1e-6 of it.
SHORT = 512
# Values of such sums that are held at a time.
HELD = 2**29
# Fewer tokens than this are as fast in float64.
WORTH_IT = 4096


def serves(right: Tensor) -> bool:
    """Whether `product` is right for inputs like these, (tokens, in)."""
    return right.is_cuda and right.dtype == torch.bfloat16 and right.shape[0] >= WORTH_IT


def product(left: Tensor, right: Tensor, terms: int, weights: Tensor | None = None) -> Tensor:
    """Σ w left rightᵀ, (m, k) float64, of left (tokens, m) and right (tokens, k), which is bf16.

    Without `weights` (tokens, 1) each is 1. `left` is bf16 and counts as it is, or it counts with
    so many `terms` of eight bits.
    """
    parts = _terms(left, weights, terms)
    tokens, m = left.shape
    k = right.shape[1]
    out = torch.zeros(m, k, dtype=torch.float64, device=right.device)
    at_once = SHORT * max(1, HELD // (m * k))
    for begin in range(0, tokens, at_once):
        rows = slice(begin, min(begin + at_once, tokens))
        _add_short(out, parts[0, rows], right[rows])
        for part in parts[1:]:  # so much smaller that how they are summed up does not matter
            out += _product(part[rows].T, right[rows])
    return out


def _terms(left: Tensor, weights: Tensor | None, terms: int) -> Tensor:
    """(terms, tokens, m) bf16."""
    if weights is None and left.dtype == torch.bfloat16:
        return left.unsqueeze(0)
    if weights is None:
        weights = torch.ones(left.shape[0], 1, device=left.device)
    if left.is_cuda and triton_works(left.device):
        from moemerge.kernels.triton_sums import weighted_terms

        return weighted_terms(left, weights.float(), terms)
    return split(left.float() * weights.float(), terms)


def _add_short(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right, every SHORT tokens apart."""
    whole = left.shape[0] // SHORT * SHORT
    if whole:
        high, other = (x[:whole].view(-1, SHORT, x.shape[1]) for x in (left, right))
        add_up(out, _product(high.mT, other))
    if whole < left.shape[0]:
        out += _product(left[whole:].T, right[whole:])


def add_up(out: Tensor, parts: Tensor) -> None:
    """out (m, k) += the sum of parts (n, m, k), in float64."""
    if out.is_cuda and triton_works(out.device):
        from moemerge.kernels import triton_sums

        triton_sums.add_up(out, parts)
    else:
        out += parts.sum(dim=0, dtype=torch.float64)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left right in float32, of one pair of bf16 matrices or of many."""
    if not left.is_cuda:  # where tests look at what is summed
        return left.float() @ right.float()
    multiply = torch.bmm if left.dim() == 3 else torch.mm
    result: Tensor = multiply(left, right, out_dtype=torch.float32)
    return result
