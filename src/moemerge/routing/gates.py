"""The mathematics of a gate: from router logits to probabilities, divergence and chosen experts.

With f the score function, p = f(z) / Σ f and g = d log f / dz. An un-normalised sigmoid is a set
of K independent Bernoulli gates instead. Everything is computed from logits through log-scores, so
that neither a saturated sigmoid nor a far tail of a softmax loses its digits. The divergence's
second derivative in the logits, H of each token, is `token_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

from moemerge.errors import ArchitectureError
from moemerge.families.rules import BiasPlace, Gate, Score

# Below this, log softplus(z) = z - e^z/2 to float64's last digits, and softplus would underflow.
_SOFTPLUS_TAIL = -18.0


def is_bernoulli(gate: Gate) -> bool:
    """Return whether the gate is K independent sigmoids instead of one distribution."""
    return gate.score is Score.SIGMOID and not gate.normalised


def capped(gate: Gate, logits: Tensor) -> Tensor:
    """Return the scaled logits after the gate's soft cap, c tanh(z / c)."""
    if gate.scale != 1.0:
        logits = logits * gate.scale
    if gate.soft_cap is None:
        return logits
    return gate.soft_cap * torch.tanh(logits / gate.soft_cap)


def _bend(gate: Gate, logits: Tensor) -> Tensor | None:
    """Return d `capped` / dz; None if it is 1 everywhere."""
    if gate.soft_cap is None:
        return None if gate.scale == 1.0 else torch.full_like(logits, gate.scale)
    if gate.scale == 1.0:
        return 1.0 - torch.tanh(logits / gate.soft_cap) ** 2
    return gate.scale * (1.0 - torch.tanh(logits * gate.scale / gate.soft_cap) ** 2)


def _log_softplus(z: Tensor) -> Tensor:
    tail = torch.clamp(z, max=_SOFTPLUS_TAIL)
    body = torch.clamp(z, min=_SOFTPLUS_TAIL)
    return torch.where(z < _SOFTPLUS_TAIL, tail - 0.5 * tail.exp(), functional.softplus(body).log())


def log_scores(gate: Gate, logits: Tensor) -> Tensor:
    """Return log f(z) without normalisation."""
    z = capped(gate, logits)
    if gate.score is Score.SOFTMAX:
        return z
    if gate.score is Score.SIGMOID:
        return functional.logsigmoid(z)
    return 0.5 * _log_softplus(z)


def log_probabilities(gate: Gate, logits: Tensor) -> Tensor:
    """Return log p: over all experts for a distribution, per expert for Bernoulli gates."""
    scores = log_scores(gate, logits)
    return scores if is_bernoulli(gate) else functional.log_softmax(scores, dim=-1)


def probabilities(gate: Gate, logits: Tensor) -> Tensor:
    """Return p; see `log_probabilities`."""
    return log_probabilities(gate, logits).exp()


def slope(gate: Gate, logits: Tensor) -> Tensor | None:
    """Return g = d log f / dz, with scale and soft cap; None if it is 1 (plain softmax)."""
    z = capped(gate, logits)
    g: Tensor | None = None
    if gate.score is Score.SIGMOID:
        g = torch.sigmoid(-z)
    elif gate.score is Score.SQRT_SOFTPLUS:
        g = 0.5 * torch.exp(functional.logsigmoid(z) - _log_softplus(z))
    bend = _bend(gate, logits)
    if bend is None:
        return g
    return bend if g is None else g * bend


def divergence(gate: Gate, target_logits: Tensor, logits: Tensor) -> Tensor:
    """Return KL(target ‖ model) of each token, (tokens,); for Bernoulli gates, summed over K."""
    log_r = log_probabilities(gate, target_logits)
    log_p = log_probabilities(gate, logits)
    kl = (log_r.exp() * (log_r - log_p)).sum(dim=-1)
    if is_bernoulli(gate):
        log_not_r = functional.logsigmoid(-capped(gate, target_logits))
        log_not_p = functional.logsigmoid(-capped(gate, logits))
        kl = kl + (log_not_r.exp() * (log_not_r - log_not_p)).sum(dim=-1)
    return kl


def divergence_gradient(gate: Gate, target_logits: Tensor, logits: Tensor) -> Tensor:
    """Return d KL / dz, (tokens, experts): g (p − r), or s − r for Bernoulli gates."""
    gap = probabilities(gate, logits) - probabilities(gate, target_logits)
    if is_bernoulli(gate):
        # d/dz [-r log s - (1-r) log(1-s)] = s - r; only scale and soft cap remain of g.
        bend = _bend(gate, logits)
        return gap if bend is None else gap * bend
    g = slope(gate, logits)
    return gap if g is None else gap * g


def select(gate: Gate, logits: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the experts of each token, (tokens, top_k), in no particular order.

    `bias` is the selection bias, which moves the choice and not p; it is needed exactly where
    the gate says it has one.
    """
    if (bias is None) != (gate.selection_bias is None):
        got = "no selection bias" if bias is None else "a selection bias"
        wants = "none" if gate.selection_bias is None else f"one (on {gate.selection_bias})"
        raise ArchitectureError(f"the gate was given {got} but has {wants}")
    z = logits if logits.dtype == torch.float64 else logits.float()
    scores = _choice_scores(gate, z, bias)
    if gate.groups > 1:
        scores = _mask_groups(gate, scores)
    return torch.topk(scores, gate.top_k, dim=-1, sorted=False).indices


def _choice_scores(gate: Gate, z: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None and gate.groups == 1:
        return z  # every score function increases with z, and logits have no ties by saturation
    if gate.selection_bias is BiasPlace.LOGITS and bias is not None:
        return capped(gate, z) + bias.to(z).reshape(-1)
    if gate.score is Score.SOFTMAX:
        scores = torch.softmax(capped(gate, z), dim=-1)
    else:
        scores = log_scores(gate, z).exp()
    return scores if bias is None else scores + bias.to(z).reshape(-1)


def _mask_groups(gate: Gate, scores: Tensor) -> Tensor:
    """Set the scores of experts outside the best `top_groups` groups to the masked score."""
    tokens, experts = scores.shape
    if experts % gate.groups:
        raise ArchitectureError(f"{experts} experts do not split into {gate.groups} equal groups")
    grouped = scores.reshape(tokens, gate.groups, experts // gate.groups)
    if gate.group_score == "max":
        group_scores = grouped.amax(dim=-1)
    elif gate.group_score == "top2_sum":
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    else:
        raise ArchitectureError(
            f"unknown group score {gate.group_score!r}", hint="known: max, top2_sum"
        )
    kept = torch.topk(group_scores, gate.top_groups, dim=-1, sorted=False).indices
    mask = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, value=False)
    return grouped.masked_fill(mask.unsqueeze(-1), gate.masked_score).reshape(tokens, experts)


class Curvature(StrEnum):
    """Which part of H is used."""

    FULL = "full"
    DIAGONAL = "diagonal"
    IDENTITY = "identity"


@dataclass(frozen=True)
class TokenWeights:
    """H of each token: H v = diagonal ⊙ v − rank_one (rank_one · v). None: identity and zero.

    For a softmax both parts are the same tensor.
    """

    diagonal: Tensor | None  # (tokens, experts)
    rank_one: Tensor | None  # (tokens, experts)

    @staticmethod
    def joined(parts: Sequence[TokenWeights]) -> TokenWeights:
        """Join the weights of consecutive groups of tokens."""
        if len(parts) == 1 or parts[0].diagonal is None:
            return parts[0]
        diagonal = torch.cat([part.diagonal for part in parts if part.diagonal is not None])
        if parts[0].rank_one is None:
            return TokenWeights(diagonal, None)
        if parts[0].rank_one is parts[0].diagonal:
            return TokenWeights(diagonal, diagonal)
        rank_one = torch.cat([part.rank_one for part in parts if part.rank_one is not None])
        return TokenWeights(diagonal, rank_one)

    def at(self, tokens: slice) -> TokenWeights:
        """Return the weights of some of the tokens."""
        diagonal = None if self.diagonal is None else self.diagonal[tokens]
        if self.rank_one is self.diagonal:
            return TokenWeights(diagonal, diagonal)
        return TokenWeights(diagonal, None if self.rank_one is None else self.rank_one[tokens])

    def apply(self, v: Tensor) -> Tensor:
        """Return H v, (tokens, experts)."""
        if self.diagonal is None:
            return v
        u = self.diagonal.to(v.dtype) * v
        if self.rank_one is not None:
            a = self.rank_one.to(v.dtype)
            u.addcmul_(a, (a * v).sum(dim=-1, keepdim=True), value=-1.0)
        return u

    def own(self, like: Tensor) -> Tensor:
        """Return diag H, (tokens, experts); never negative."""
        if self.diagonal is None:
            return torch.ones_like(like)
        h = self.diagonal.to(like.dtype)
        if self.rank_one is not None:
            h = (h - self.rank_one.to(like.dtype) ** 2).clamp_min_(0.0)
        return h


def token_weights(
    gate: Gate, logits: Tensor, curvature: Curvature, dtype: torch.dtype
) -> TokenWeights:
    """Return H at `logits` (float64 for full accuracy), stored in `dtype`."""
    if curvature is Curvature.IDENTITY:
        return TokenWeights(None, None)
    p = probabilities(gate, logits)
    if is_bernoulli(gate):
        h = p * torch.sigmoid(-capped(gate, logits))
        bend = _bend(gate, logits)
        if bend is not None:
            h = h * bend**2
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
    """Shrink a by an ulp if rounding would make diag(b) − a aᵀ indefinite (b None: b = a).

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
