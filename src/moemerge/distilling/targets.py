"""The teacher's next-token distribution, and the loss of a student that should match it.

At every position a teacher's distribution p is stored as its k most probable tokens and their
log-probabilities. The other tokens form one group. The loss is the KL divergence between the two
distributions over these k + 1 outcomes:

    KL(p ‖ q) = Σ_{i in top k} p_i (log p_i − log q_i) + p_rest (log p_rest − log q_rest)

It is a lower bound of the full divergence, and equal to it if k is the vocabulary's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The probability of the remaining tokens never falls below this: log(0) has no gradient.
LEAST_REST = 1e-7


@dataclass(frozen=True)
class TopTokens:
    """The most probable next tokens of each position, with their log-probabilities."""

    tokens: Tensor  # (positions, k) int32 or int64
    log_probs: Tensor  # (positions, k) float32

    def to(self, device: torch.device) -> TopTokens:
        return TopTokens(
            self.tokens.to(device, torch.int64, non_blocking=True),
            self.log_probs.to(device, non_blocking=True),
        )


def top_tokens(logits: Tensor, k: int) -> TopTokens:
    """Return the `k` most probable tokens of logits (positions, vocabulary)."""
    wide = logits.float()
    values, tokens = wide.topk(min(k, wide.shape[-1]), dim=-1)
    log_probs = values - torch.logsumexp(wide, dim=-1, keepdim=True)
    return TopTokens(tokens.to(torch.int32), log_probs)


def divergence(logits: Tensor, teacher: TopTokens) -> Tensor:
    """Return KL(teacher ‖ student) at each position, (positions,), from the student's logits."""
    wide = logits.float()
    log_q = wide.gather(-1, teacher.tokens.long()) - torch.logsumexp(wide, dim=-1, keepdim=True)
    log_p = teacher.log_probs
    p = log_p.exp()
    rest_p = (1.0 - p.sum(-1)).clamp_min(LEAST_REST)
    rest_q = (1.0 - log_q.exp().sum(-1)).clamp_min(LEAST_REST)
    rest = rest_p * (rest_p.log() - rest_q.log())
    return (p * (log_p - log_q)).sum(-1) + (rest if wide.shape[-1] > p.shape[-1] else 0.0)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the cross-entropy of the tokens (positions,) that follow, (positions,)."""
    return torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none")
