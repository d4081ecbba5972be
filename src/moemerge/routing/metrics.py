"""How well one router's choices agree with another's, gathered block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.architectures.gates import Gate, Score
from moemerge.errors import DataError
from moemerge.kernels import agreement
from moemerge.routing.domains import DomainFeatures, chunks_of
from moemerge.routing.gates import divergence, select
from moemerge.routing.products import features_of
from moemerge.routing.weights import Curvature, TokenWeights, token_weights

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


@dataclass(frozen=True)
class Wanted:
    """What is wanted of some tokens: computed once for all routers that are measured on them."""

    logits: Tensor  # (tokens, K), float64
    chosen: Tensor  # (tokens, K), bool
    weights: TokenWeights
    norm: Tensor  # (tokens,), of the logits

    @classmethod
    def of(cls, gate: Gate, logits: Tensor, bias: Tensor | None = None) -> Wanted:
        """From (tokens, K) target logits and the target's selection bias."""
        wide = logits.double()
        return cls(
            wide,
            _chosen(gate, logits, bias),
            token_weights(gate, wide, Curvature.FULL, torch.float64),
            wide.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny),
        )


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
        if logits.shape[0] > 0:
            self.compare(Wanted.of(self.gate, target_logits, self.target_bias), logits)

    def compare(self, wanted: Wanted, logits: Tensor) -> None:
        """`update` with a target that is prepared already."""
        chosen = _chosen(self.gate, logits, self.bias)
        z = logits.double()
        hits = chosen.logical_and(wanted.chosen).sum(dim=-1).double()
        missed = 1.0 - hits / self.gate.top_k
        gap = z - wanted.logits
        shift = gap.norm(dim=-1) / wanted.norm
        sums = torch.stack(
            [
                divergence(self.gate, wanted.logits, z).sum(),
                0.5 * (gap * wanted.weights.apply(gap)).sum(),
                missed.sum(),
                (missed > 0).double().sum(),
                (wanted.logits.argmax(dim=-1) == z.argmax(dim=-1)).double().sum(),
                shift.sum(),
                (shift < SMALL_SHIFT).double().sum(),
                (shift < MODERATE_SHIFT).double().sum(),
            ]
        )
        self.add(sums, torch.stack([wanted.chosen.sum(dim=0), chosen.sum(dim=0)]), len(logits))

    def add(self, sums: Tensor, loads: Tensor, tokens: int) -> None:
        """Add what was summed up elsewhere."""
        self._sums = sums if self._sums is None else self._sums + sums
        self._loads = loads if self._loads is None else self._loads + loads
        self.tokens += tokens

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


def _chosen(gate: Gate, logits: Tensor, bias: Tensor | None) -> Tensor:
    """The gate's choice as a (tokens, K) mask."""
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    return mask.scatter_(1, select(gate, logits, bias), value=True)


def measure(
    gate: Gate,
    domain: DomainFeatures,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    target_bias: Tensor | None = None,
) -> RoutingMetrics:
    """How the router `weight` agrees with the domain's target on the domain's features."""
    return measure_routers(gate, domain, [weight], bias=bias, target_bias=target_bias)[0]


def measure_routers(
    gate: Gate,
    domain: DomainFeatures,
    weights: Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    target_bias: Tensor | None = None,
) -> list[RoutingMetrics]:
    """`measure` for several routers, in one pass over the domain."""
    accumulators = [MetricsAccumulator(gate, bias=bias, target_bias=target_bias) for _ in weights]
    device = domain.features[0].device
    target_router, *routers = (w.to(device) for w in (domain.router, *weights))
    for x, target in chunks_of(domain):
        features = features_of(x, target_router.shape[1])
        wanted = features.working_logits(target_router) if target is None else target
        said = [features.working_logits(router) for router in routers]
        _compare(accumulators, wanted, said)
    return [accumulator.result() for accumulator in accumulators]


def _compare(
    accumulators: Sequence[MetricsAccumulator], target: Tensor, said: Sequence[Tensor]
) -> None:
    """Add a block's logits, one tensor for each accumulator, by the kernel where it serves."""
    first = accumulators[0]
    if _is_plain(first.gate) and agreement.usable(target, said[0]):
        for accumulator, logits in zip(accumulators, said, strict=True):
            sums, loads = agreement.agreement(
                target, logits, first.gate.top_k, (SMALL_SHIFT, MODERATE_SHIFT)
            )
            accumulator.add(sums, loads, len(logits))
        return
    wanted = Wanted.of(first.gate, target, first.target_bias)
    for accumulator, logits in zip(accumulators, said, strict=True):
        accumulator.compare(wanted, logits)


def _is_plain(gate: Gate) -> bool:
    """A softmax whose choice is that of the largest logits."""
    return (
        gate.score is Score.SOFTMAX
        and gate.soft_cap is None
        and gate.selection_bias is None
        and gate.groups == 1
    )
