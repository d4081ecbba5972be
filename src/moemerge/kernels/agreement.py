"""Figures of routing of a plain softmax gate on a GPU, in one pass over the two routers' logits."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moemerge.kernels.availability import triton_works

# The sums that the kernel forms, in its order, by the names of `routing.figures`.
FIGURES = (
    "kl",
    "quadratic",
    "mismatch",
    "any_mismatch",
    "top1_agreement",
    "logit_shift",
    "shift_small",
    "shift_moderate",
)
MOST_EXPERTS = 512
ENTRIES = 2048  # of a program's (tokens, experts) tile: float64 takes many registers


def usable(target: Tensor, logits: Tensor) -> bool:
    """Whether the kernel serves these logits."""
    return (
        logits.is_cuda
        and target.dtype == logits.dtype == torch.float32
        and logits.shape[1] <= MOST_EXPERTS
        and triton_works(logits.device)
    )


def agreement(
    target: Tensor, logits: Tensor, top_k: int, bounds: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """The sums of FIGURES, (8,) float64, and both routers' loads, (2, K) int64.

    `bounds`: the relative logit shifts that count as small and as moderate.
    """
    tokens, experts = logits.shape
    padded = max(16, 1 << (experts - 1).bit_length())
    rows = max(1, ENTRIES // padded)
    programs = -(-tokens // rows)
    sums = torch.empty(programs, 8, dtype=torch.float64, device=logits.device)
    loads = torch.empty(programs, 2, padded, dtype=torch.int32, device=logits.device)
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        _kernels().agreement_kernel[(programs,)](
            target.contiguous(),
            logits.contiguous(),
            sums,
            loads,
            tokens,
            K=experts,
            TOP_K=top_k,
            SMALL=bounds[0],
            MODERATE=bounds[1],
            BT=rows,
            BK=padded,
        )
    return sums.sum(dim=0), loads[:, :, :experts].sum(dim=0)


@cache
def _kernels() -> Any:
    from moemerge.kernels import triton_agreement

    return triton_agreement
