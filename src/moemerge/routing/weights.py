"""H of each token: what the divergence's second derivative in the logits is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from moemerge.architectures.gates import Gate
from moemerge.routing.gates import capped, is_bernoulli, probabilities, slope


class Curvature(StrEnum):
    """How much of H is kept."""

    FULL = "full"
    DIAGONAL = "diagonal"
    IDENTITY = "identity"


@dataclass(frozen=True)
class TokenWeights:
    """H of each token as H v = diagonal ⊙ v − rank_one (rank_one · v). None: identity, nothing.

    A softmax' two parts are one and the same tensor.
    """

    diagonal: Tensor | None  # (tokens, experts)
    rank_one: Tensor | None  # (tokens, experts)

    @staticmethod
    def joined(parts: Sequence[TokenWeights]) -> TokenWeights:
        """The weights of consecutive groups of tokens as one."""
        if len(parts) == 1 or parts[0].diagonal is None:
            return parts[0]
        diagonal = torch.cat([part.diagonal for part in parts if part.diagonal is not None])
        if parts[0].rank_one is None:
            return TokenWeights(diagonal, None)
        if parts[0].rank_one is parts[0].diagonal:
            return TokenWeights(diagonal, diagonal)
        rank_one = torch.cat([part.rank_one for part in parts if part.rank_one is not None])
        return TokenWeights(diagonal, rank_one)

    def rows(self, begin: int, end: int) -> TokenWeights:
        """The weights of some of the tokens."""
        diagonal = None if self.diagonal is None else self.diagonal[begin:end]
        if self.rank_one is self.diagonal:
            return TokenWeights(diagonal, diagonal)
        return TokenWeights(diagonal, None if self.rank_one is None else self.rank_one[begin:end])

    def every(self, stride: int) -> TokenWeights:
        """The weights of every `stride`th token."""
        diagonal = None if self.diagonal is None else self.diagonal[::stride]
        if self.rank_one is self.diagonal:
            return TokenWeights(diagonal, diagonal)
        return TokenWeights(diagonal, None if self.rank_one is None else self.rank_one[::stride])

    def apply(self, v: Tensor) -> Tensor:
        """H v, (tokens, experts)."""
        if self.diagonal is None:
            return v
        u = self.diagonal.to(v.dtype) * v
        if self.rank_one is not None:
            a = self.rank_one.to(v.dtype)
            u.addcmul_(a, (a * v).sum(dim=-1, keepdim=True), value=-1.0)
        return u

    def own(self, like: Tensor) -> Tensor:
        """diag H, (tokens, experts); never negative."""
        if self.diagonal is None:
            return torch.ones_like(like)
        h = self.diagonal.to(like.dtype)
        if self.rank_one is not None:
            h = (h - self.rank_one.to(like.dtype) ** 2).clamp_min_(0.0)
        return h


def token_weights(
    gate: Gate, logits: Tensor, curvature: Curvature, dtype: torch.dtype
) -> TokenWeights:
    """H at `logits` (float64 for full accuracy), stored in `dtype`."""
    if curvature is Curvature.IDENTITY:
        return TokenWeights(None, None)
    p = probabilities(gate, logits)
    if is_bernoulli(gate):
        h = p * torch.sigmoid(-capped(gate, logits))
        if gate.soft_cap is not None:
            h = h * (1.0 - torch.tanh(logits / gate.soft_cap) ** 2) ** 2
        return TokenWeights(h.to(dtype), None)
    g = slope(gate, logits)
    a = p if g is None else p * g
    b = p if g is None else a * g
    if curvature is Curvature.DIAGONAL:
        return TokenWeights((b - a * a).to(dtype), None)
    if g is None:
        stored = _keep_positive(a.to(dtype), None)
        return TokenWeights(stored, stored)
    diagonal = b.to(dtype)
    return TokenWeights(diagonal, _keep_positive(a.to(dtype), diagonal))


def _keep_positive(a: Tensor, b: Tensor | None) -> Tensor:
    """Shrink a by an ulp where rounding would make diag(b) − a aᵀ indefinite (b None: b = a).

    That matrix is positive semidefinite exactly when Σ a²/b <= 1 (for a softmax, Σ p <= 1).
    Rounding the shrunk value adds at most half the ulp taken away.
    """
    wide = a.double()
    if b is None:
        excess = wide.sum(dim=-1, keepdim=True)
        shrunk = wide / excess
    else:
        ratio = wide * wide / b.double()
        ratio = torch.where(b > 0, ratio, torch.zeros_like(ratio))
        excess = ratio.sum(dim=-1, keepdim=True)
        shrunk = wide * excess.rsqrt()
    shrunk = shrunk * (1.0 - torch.finfo(a.dtype).eps)
    return torch.where(excess > 1.0, shrunk.to(a.dtype), a)
