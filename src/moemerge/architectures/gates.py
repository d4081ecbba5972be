"""How a family turns router logits into a choice of experts, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Score(StrEnum):
    """The score function f of p_k = f(z_k) / sum f."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"


class BiasPlace(StrEnum):
    """Where a selection bias is added before the Top-k."""

    SCORES = "scores"  # to f(z), or to the probabilities of a softmax
    LOGITS = "logits"


@dataclass(frozen=True)
class Gate:
    """One layer's gate. `normalised` is about p as a distribution: a sigmoid that is never
    renormalised is a set of independent Bernoulli gates, and has another divergence."""

    score: Score
    top_k: int
    normalised: bool = True
    selection_bias: BiasPlace | None = None
    groups: int = 1  # group-limited Top-k: experts are split into `groups` ...
    top_groups: int = 1  # ... and only the best `top_groups` of them may be chosen from
    group_score: str = "max"  # "max" or "top2_sum"
    soft_cap: float | None = None  # z -> c tanh(z / c)
    approximate: str | None = None  # why this gate is only approximated, in words
    masked_score: float = float("-inf")  # what experts outside the kept groups score (axk2: 0)
