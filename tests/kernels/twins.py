"""Dense float64 twins of the kernels' products, and weights to try them with."""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("softmax", "rank_one", "diagonal", "identity")
Weights = tuple[Tensor | None, Tensor | None]  # H's diagonal and its rank-one part


def weights(kind: str, tokens: int, experts: int, device: str) -> Weights:
    p = torch.softmax(2 * torch.randn(tokens, experts, device=device), dim=-1)
    if kind == "identity":
        return None, None
    if kind == "diagonal":
        return p, None
    return (p, p) if kind == "softmax" else (p, p * torch.rand_like(p))


def wide(x: Tensor, bias: bool) -> Tensor:
    """[x 1] in float64."""
    return torch.cat([x, x.new_ones(len(x), 1)], dim=1).double() if bias else x.double()


def product(x: Tensor, h: Weights, v: Tensor) -> Tensor:
    """Σ_t H_t (V [x_t 1]) [x_t 1]ᵀ, the 1 where V has a column for it."""
    diagonal, rank_one = h
    xx = wide(x, bias=v.shape[1] > x.shape[1])
    z = xx @ v.T
    u = z if diagonal is None else diagonal.double() * z
    if rank_one is not None:
        a = rank_one.double()
        u = u - a * (a * z).sum(dim=-1, keepdim=True)
    return u.T @ xx


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())
