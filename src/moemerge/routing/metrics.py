"""How well one router's choices agree with another's, gathered block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.architectures.gates import Gate
from moemerge.errors import DataError
from moemerge.routing.curvature import (
    Curvature,
    Domain,
    chunks_of,
    logits_of,
    token_weights,
    working_dtype,
)
from moemerge.routing.gates import divergence, select

# The paper's bounds for the relative logit shift of Lemma 1's neighbourhood.
SMALL_SHIFT = 0.1
MODERATE_SHIFT = 0.2


@dataclass(frozen=True)
class RoutingMetrics:
    """Agreement of a router with its target over some tokens."""

    tokens: int
    kl: float  # mean KL(target ‖ model)
    quadratic: float  # mean of its second-order model ½ (z − z')ᵀ H (z − z')
    mismatch: float  # share of the target's Top-k choices that were not made
    any_mismatch: float  # share of tokens with at least one such choice
    top1_agreement: float  # share of tokens whose highest-scored expert is the same
    load_target: tuple[float, ...]  # share of all choices that each expert receives
    load: tuple[float, ...]
    logit_shift: float  # mean ‖z − z'‖ / ‖z'‖
    shift_small: float  # share of tokens where that is below 0.1
    shift_moderate: float  # ... below 0.2


class MetricsAccumulator:
    """Sums over blocks on the device; the host looks once, at the end.

    The two selection biases may differ: a merged model's bias is not its source's.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        bias: Tensor | None = None,
        target_bias: Tensor | None = None,
    ) -> None:
        self.gate = gate
        self.bias = bias
        self.target_bias = target_bias
        self.tokens = 0
        self._sums: Tensor | None = None  # the eight means below, as sums
        self._loads: Tensor | None = None  # (2, K)

    def update(self, target_logits: Tensor, logits: Tensor) -> None:
        """Add a block of (tokens, K) logits: what was wanted, and what the router says."""
        if target_logits.shape != logits.shape:
            raise DataError(
                f"target logits {tuple(target_logits.shape)}, logits {tuple(logits.shape)}"
            )
        if logits.shape[0] == 0:
            return
        wanted = select(self.gate, target_logits, self.target_bias)
        chosen = select(self.gate, logits, self.bias)
        target, z = target_logits.double(), logits.double()
        hits = _chosen(chosen, z).logical_and(_chosen(wanted, z)).sum(dim=-1).double()
        missed = 1.0 - hits / self.gate.top_k
        gap = z - target
        h = token_weights(self.gate, target, Curvature.FULL, torch.float64)
        shift = gap.norm(dim=-1) / target.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        sums = torch.stack(
            [
                divergence(self.gate, target, z).sum(),
                0.5 * (gap * h.apply(gap)).sum(),
                missed.sum(),
                (missed > 0).double().sum(),
                (target.argmax(dim=-1) == z.argmax(dim=-1)).double().sum(),
                shift.sum(),
                (shift < SMALL_SHIFT).double().sum(),
                (shift < MODERATE_SHIFT).double().sum(),
            ]
        )
        loads = torch.stack([_chosen(wanted, z).sum(dim=0), _chosen(chosen, z).sum(dim=0)])
        self._sums = sums if self._sums is None else self._sums + sums
        self._loads = loads if self._loads is None else self._loads + loads
        self.tokens += logits.shape[0]

    def result(self) -> RoutingMetrics:
        """The metrics over everything added so far."""
        if self._sums is None or self._loads is None:
            raise DataError("routing metrics over no token", hint="give the domain some text")
        kl, quadratic, missed, any_missed, top1, shift, small, moderate = (
            self._sums / self.tokens
        ).tolist()
        loads = (self._loads.double() / (self.tokens * self.gate.top_k)).tolist()
        return RoutingMetrics(
            tokens=self.tokens,
            kl=kl,
            quadratic=quadratic,
            mismatch=missed,
            any_mismatch=any_missed,
            top1_agreement=top1,
            load_target=tuple(loads[0]),
            load=tuple(loads[1]),
            logit_shift=shift,
            shift_small=small,
            shift_moderate=moderate,
        )


def _chosen(experts: Tensor, like: Tensor) -> Tensor:
    """Indices (tokens, k) as a (tokens, K) mask."""
    mask = torch.zeros(like.shape, dtype=torch.bool, device=like.device)
    return mask.scatter_(1, experts, value=True)


def measure(
    gate: Gate,
    domain: Domain,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    target_bias: Tensor | None = None,
) -> RoutingMetrics:
    """How the router `weight` agrees with the domain's target on the domain's features."""
    accumulator = MetricsAccumulator(gate, bias=bias, target_bias=target_bias)
    for x, target in chunks_of(domain):
        narrow = x.to(working_dtype(x))
        wanted = logits_of(narrow, domain.router.to(x.device)) if target is None else target
        accumulator.update(wanted, logits_of(narrow, weight.to(x.device)))
    return accumulator.result()
