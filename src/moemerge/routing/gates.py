"""The mathematics of a gate: from router logits to probabilities, divergence and chosen experts.

With f the score function, p = f(z) / Σ f and g = d log f / dz. An un-normalised sigmoid is a set
of K independent Bernoulli gates instead. Everything is computed from logits through log-scores, so
that neither a saturated sigmoid nor a far tail of a softmax loses its digits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moemerge.architectures.gates import BiasPlace, Gate, Score
from moemerge.errors import ArchitectureError

# Below this, log softplus(z) = z - e^z/2 to float64's last digits, and softplus would underflow.
_SOFTPLUS_TAIL = -18.0


def is_bernoulli(gate: Gate) -> bool:
    """Whether the gate is K independent sigmoids rather than one distribution over experts."""
    return gate.score is Score.SIGMOID and not gate.normalised


def capped(gate: Gate, logits: Tensor) -> Tensor:
    """The logits after the gate's soft cap, c tanh(z / c)."""
    if gate.soft_cap is None:
        return logits
    return gate.soft_cap * torch.tanh(logits / gate.soft_cap)


def _log_softplus(z: Tensor) -> Tensor:
    tail = torch.clamp(z, max=_SOFTPLUS_TAIL)
    body = torch.clamp(z, min=_SOFTPLUS_TAIL)
    return torch.where(z < _SOFTPLUS_TAIL, tail - 0.5 * tail.exp(), functional.softplus(body).log())


def log_scores(gate: Gate, logits: Tensor) -> Tensor:
    """log f(z), with f's normaliser left out."""
    z = capped(gate, logits)
    if gate.score is Score.SOFTMAX:
        return z
    if gate.score is Score.SIGMOID:
        return functional.logsigmoid(z)
    return 0.5 * _log_softplus(z)


def log_probabilities(gate: Gate, logits: Tensor) -> Tensor:
    """log p: over all experts for a distribution, each expert's own for Bernoulli gates."""
    scores = log_scores(gate, logits)
    return scores if is_bernoulli(gate) else functional.log_softmax(scores, dim=-1)


def probabilities(gate: Gate, logits: Tensor) -> Tensor:
    """p, as `log_probabilities`."""
    return log_probabilities(gate, logits).exp()


def slope(gate: Gate, logits: Tensor) -> Tensor | None:
    """g = d log f / dz, soft cap included; None where it is 1 everywhere (a plain softmax)."""
    z = capped(gate, logits)
    g: Tensor | None = None
    if gate.score is Score.SIGMOID:
        g = torch.sigmoid(-z)
    elif gate.score is Score.SQRT_SOFTPLUS:
        g = 0.5 * torch.exp(functional.logsigmoid(z) - _log_softplus(z))
    if gate.soft_cap is None:
        return g
    bend = 1.0 - torch.tanh(logits / gate.soft_cap) ** 2
    return bend if g is None else g * bend


def divergence(gate: Gate, target_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(target ‖ model) of each token, (tokens,); the sum of K Bernoulli ones where apt."""
    log_r = log_probabilities(gate, target_logits)
    log_p = log_probabilities(gate, logits)
    kl = (log_r.exp() * (log_r - log_p)).sum(dim=-1)
    if is_bernoulli(gate):
        log_not_r = functional.logsigmoid(-capped(gate, target_logits))
        log_not_p = functional.logsigmoid(-capped(gate, logits))
        kl = kl + (log_not_r.exp() * (log_not_r - log_not_p)).sum(dim=-1)
    return kl


def divergence_gradient(gate: Gate, target_logits: Tensor, logits: Tensor) -> Tensor:
    """d KL(target ‖ model) / dz, (tokens, experts): g (p − r), or s − r for Bernoulli gates."""
    gap = probabilities(gate, logits) - probabilities(gate, target_logits)
    if is_bernoulli(gate):
        # d/dz [-r log s - (1-r) log(1-s)] = s - r; only the soft cap's bend remains of g.
        if gate.soft_cap is None:
            return gap
        return gap * (1.0 - torch.tanh(logits / gate.soft_cap) ** 2)
    g = slope(gate, logits)
    return gap if g is None else gap * g


def select(gate: Gate, logits: Tensor, bias: Tensor | None = None) -> Tensor:
    """The experts each token is sent to, (tokens, top_k), in no particular order.

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
        return z  # every score function rises with z, and logits do not saturate into ties
    if gate.selection_bias is BiasPlace.LOGITS and bias is not None:
        return capped(gate, z) + bias.to(z).reshape(-1)
    if gate.score is Score.SOFTMAX:
        scores = torch.softmax(capped(gate, z), dim=-1)
    else:
        scores = log_scores(gate, z).exp()
    return scores if bias is None else scores + bias.to(z).reshape(-1)


def _mask_groups(gate: Gate, scores: Tensor) -> Tensor:
    """Experts outside the best `top_groups` groups get the gate's masked score."""
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
