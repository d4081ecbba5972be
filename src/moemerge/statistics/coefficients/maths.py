"""Compute coefficients from measurements; numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Identical models would share infinite information.
MOST_CORRELATED = 1 - 1e-9


class Information:
    """The mutual information of two models' hidden states, accumulated over tokens.

    Each channel is taken as jointly Gaussian: I = -½ ln(1 - ρ²), with ρ the correlation over
    tokens. The result is the mean over channels that vary in both models, in nats.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: Tensor | None = None  # (5, d): Σa, Σb, Σa², Σb², Σab

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add the same tokens of both models, (tokens, d)."""
        a, b = a.double(), b.double()
        sums = torch.stack([x.sum(0) for x in (a, b, a * a, b * b, a * b)])
        self._sums = sums if self._sums is None else self._sums + sums
        self._count += a.shape[0]

    def mean(self) -> float:
        """Return the mean in nats; 0 if nothing varies."""
        if self._sums is None:
            return 0.0
        of_a, of_b, aa, bb, ab = self._sums / self._count
        variance_a, variance_b = aa - of_a**2, bb - of_b**2
        floor = torch.finfo(torch.float64).eps * 16
        varies = (variance_a > floor * aa) & (variance_b > floor * bb)
        if not bool(varies.any()):
            return 0.0
        covariance = (ab - of_a * of_b)[varies]
        squares = covariance**2 / (variance_a * variance_b)[varies]
        return float((-0.5 * torch.log1p(-squares.clamp(0, MOST_CORRELATED))).mean())


def falling(information: float, sharpness: float) -> float:
    """Return 1 - 1 / (1 + e^(-t I)): one half without shared information, towards 0 with much."""
    return 1 / (1 + math.exp(min(sharpness * information, 700.0)))


def transfer(distances: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return shares that sum to one, by how well each model predicts the others.

    `distances[i][j]` is the distance of model i's logits from model j's on the text of j; smaller
    distances mean larger shares. Models without any distance share equally.
    """
    totals = {name: math.fsum(others.values()) for name, others in distances.items()}
    if min(totals.values()) <= 0:
        return dict.fromkeys(totals, 1 / len(totals))
    inverse = {name: 1 / total for name, total in totals.items()}
    return {name: value / math.fsum(inverse.values()) for name, value in inverse.items()}


def balanced_coefficients(
    sensitivities: Mapping[str, Sequence[float]], shares: Mapping[str, float], temperature: float
) -> dict[str, list[float]]:
    """Return T softmax_i(a_il c_i / temperature), with a_i the layers' normalised sensitivities."""
    names = list(sensitivities)
    unit = {}
    for name, values in sensitivities.items():
        length = math.hypot(*values)
        unit[name] = [value / length if length > 0 else 0.0 for value in values]
    layers = len(unit[names[0]])
    result: dict[str, list[float]] = {name: [] for name in names}
    for layer in range(layers):
        scores = [unit[name][layer] * shares[name] / temperature for name in names]
        softmax = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
        for name, value in zip(names, softmax, strict=True):
            result[name].append(len(names) * value)
    return result


def served_domain(activity: Tensor, specific: float) -> Tensor:
    """Return the domain that each neuron serves: (domains, neurons) of mean squares -> (neurons,).

    It is the domain where the neuron is most active, if that is at least `specific` times the mean
    of the others. Otherwise it is the number of domains, which means none.
    """
    count = activity.shape[0]
    most, served = activity.max(dim=0)
    if count < 2:
        return torch.full_like(served, count)
    others = (activity.sum(dim=0) - most) / (count - 1)
    own = (most > 0) & (most >= specific * others) & (most > others)
    return torch.where(own, served, count)


def next_token_entropy(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the mean entropy of the next token over real tokens: logits (rows, tokens, vocab)."""
    logs = logits[mask].float().log_softmax(-1)  # (real, vocab)
    return -(logs.exp() * logs).sum(-1).mean()


def next_token_divergence(logits: Tensor, expert: Tensor) -> Tensor:
    """Return the mean KL(expert || model) of the next token: (tokens, vocab) each."""
    ours, theirs = logits.float().log_softmax(-1), expert.float().log_softmax(-1)
    return (theirs.exp() * (theirs - ours)).sum(-1).mean()


def relative_distance(states: Tensor, expert: Tensor) -> Tensor:
    """Return Σ ‖h - h_expert‖² / Σ ‖h_expert‖² over tokens: (tokens, d) each."""
    size = expert.float().square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    return (states.float() - expert.float()).square().sum() / size
