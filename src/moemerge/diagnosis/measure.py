"""How a router of one model agrees with the same router of another, token by token.

Logits are float32 products of what each model feeds its router; everything after them is float64,
since a divergence is of second order in differences that may be small. Sums stay on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn import functional

from moemerge.architectures.gates import Gate
from moemerge.errors import DataError
from moemerge.routing.curvature import Curvature, token_weights
from moemerge.routing.gates import (
    divergence,
    is_bernoulli,
    log_probabilities,
    select,
    slope,
)
from moemerge.routing.metrics import MODERATE_SHIFT, SMALL_SHIFT

# Pairs of experts that the flow lists: enough for a picture, few enough for a document.
FLOWS: Final = 40
# An expert is dead with less than this share of an even load, if its source gave it a fair one.
DEAD: Final = 0.05
FAIR: Final = 0.25
# An expert is overloaded with so many times its source's load, and so many times an even one.
OVERLOADED: Final = 2.0
# Keeps 0 / 0 at 0; representable in float32, in which logits and features are.
TINY: Final = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class RouterView:
    """A router as its model computes with it, on the model's device."""

    gate: Gate
    weight: Tensor  # (K, d)
    bias: Tensor | None  # (K,), added to the logits
    selection_bias: Tensor | None  # (K,), moves the choice alone

    def logits(self, features: Tensor) -> Tensor:
        """W x + b for features (tokens, d): (tokens, K), float32 at least."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(features.to(dtype), self.weight.to(dtype), bias)

    def chosen(self, logits: Tensor) -> Tensor:
        """Which experts each token is sent to: (tokens, K), bool."""
        experts = select(self.gate, logits, self.selection_bias)
        return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, value=True)


@dataclass(frozen=True)
class Measured:
    """The means of one router over its tokens; `results.LayerDiagnosis` says what they are."""

    tokens: int
    mismatch: float
    any_mismatch: float
    top1_agreement: float
    weighted_overlap: float
    kl: float
    kl_on_features: float
    mismatch_on_features: float
    quadratic: float
    logit_shift: float
    shift_small: float
    shift_moderate: float
    drift: float
    load_source: tuple[float, ...]
    load: tuple[float, ...]
    flow: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Divergences:
    """Of each token: KL(wanted ‖ got), KL(moved ‖ got) and its second-order model; (tokens,)."""

    kl: Tensor
    on_features: Tensor
    quadratic: Tensor
    wanted: Tensor  # probabilities, (tokens, K)
    got: Tensor


def missed_share(wanted: Tensor, made: Tensor, top_k: int) -> Tensor:
    """The share of each token's wanted choices that were not made, (tokens,) float64."""
    return wanted.logical_and(made.logical_not()).sum(dim=-1).double() / top_k


def overlap(wanted: tuple[Tensor, Tensor], made: tuple[Tensor, Tensor]) -> Tensor:
    """Σ min(w, w') of each token, (tokens,); w are the weights of the chosen experts, summing to 1.

    Both are given as (probabilities, chosen). Computed as 1 − ½ Σ |w − w'|, which is exact for
    w = w'.
    """
    shares = []
    for probabilities, chosen in (wanted, made):
        weights = probabilities * chosen
        shares.append(weights.div_(weights.sum(dim=-1, keepdim=True).clamp_min_(TINY)))
    return 1.0 - 0.5 * shares[0].sub_(shares[1]).abs_().sum(dim=-1)


def divergences(gate: Gate, wanted: Tensor, moved: Tensor, z: Tensor) -> Divergences:
    """All that needs the distributions, in one go: float64 logits, (tokens, K) each."""
    log_w, log_m, log_p = (log_probabilities(gate, logits) for logits in (wanted, moved, z))
    w, m, p = log_w.exp(), log_m.exp(), log_p.exp()
    gap = z - moved
    if is_bernoulli(gate):
        curved = token_weights(gate, moved, Curvature.FULL, torch.float64).apply(gap)
        kl, on_features = divergence(gate, wanted, z), divergence(gate, moved, z)
        return Divergences(kl, on_features, 0.5 * vecdot(gap, curved), w, p)
    g = slope(gate, moved)
    v = gap if g is None else g * gap
    quadratic = 0.5 * (vecdot(m * v, v) - vecdot(m, v) ** 2)  # ½ δᵀ D_g (diag p − ppᵀ) D_g δ
    return Divergences(vecdot(w, log_w.sub_(log_p)), vecdot(m, log_m.sub_(log_p)), quadratic, w, p)


def relative_gap(a: Tensor, b: Tensor) -> Tensor:
    """‖a − b‖ / ‖b‖ of each row, (tokens,) float64; 0 where both are 0."""
    gap: Tensor = torch.linalg.vector_norm(a - b, dim=-1).double()
    size: Tensor = torch.linalg.vector_norm(b, dim=-1).double()
    return gap / size.clamp_min(TINY)


class RouterComparison:
    """Sums over the batches of one domain at one router: the model's against its source's."""

    def __init__(self, source: RouterView, model: RouterView) -> None:
        self.source = source
        self.model = model
        self.tokens = 0
        self._sums: Tensor | None = None  # the twelve means of `Measured`, as sums
        self._loads: Tensor | None = None  # (2, K)
        self._flow: Tensor | None = None  # (K, K): from the expert that lost to the one that took

    def add(self, own_features: Tensor, features: Tensor) -> Tensor:
        """Add the same tokens' router inputs in the source and in the model, (tokens, d) each.

        Gives which tokens miss a choice of their source, (tokens,) bool.
        """
        if own_features.shape != features.shape:
            raise DataError(
                f"router inputs {tuple(own_features.shape)} of the source beside "
                f"{tuple(features.shape)} of the model"
            )
        wanted_logits = self.source.logits(own_features)  # what the source does
        logits = self.model.logits(features)  # what the model does
        moved_logits = self.source.logits(features)  # the source's router in the model's place
        wanted, made = self.source.chosen(wanted_logits), self.model.chosen(logits)
        moved = self.source.chosen(moved_logits)
        top_k = self.source.gate.top_k
        missed = missed_share(wanted, made, top_k)
        wide = torch.promote_types(features.dtype, torch.float32)
        drift = relative_gap(features.to(wide), own_features.to(wide))
        found = divergences(
            self.model.gate, wanted_logits.double(), moved_logits.double(), logits.double()
        )
        shift = relative_gap(logits, moved_logits)
        means = [
            found.kl,
            found.on_features,
            found.quadratic,
            (wanted_logits.argmax(dim=-1) == logits.argmax(dim=-1)).double(),
            shift,
            (shift < SMALL_SHIFT).double(),
            (shift < MODERATE_SHIFT).double(),
            overlap((found.wanted, wanted), (found.got, made)),
            missed,
            (missed > 0).double(),
            missed_share(moved, made, top_k),
            drift,
        ]
        self._add(torch.stack([mean.sum() for mean in means]), wanted, made)
        self.tokens += features.shape[0]
        return missed > 0

    def _add(self, sums: Tensor, wanted: Tensor, made: Tensor) -> None:
        loads = torch.stack([wanted.sum(dim=0), made.sum(dim=0)])
        lost = wanted.logical_and(made.logical_not()).float()
        taken = made.logical_and(wanted.logical_not()).float()
        takers = taken.sum(dim=-1, keepdim=True).clamp_min(1.0)
        flow = (lost.T @ (taken / takers)).double()
        if self._sums is None or self._loads is None or self._flow is None:
            self._sums, self._loads, self._flow = sums, loads, flow
        else:
            self._sums, self._loads = self._sums + sums, self._loads + loads
            self._flow = self._flow + flow

    def result(self) -> Measured:
        """The means so far: the one moment at which the host waits for the device."""
        if self._sums is None or self._loads is None or self._flow is None or not self.tokens:
            raise DataError("routing figures over no token", hint="give the domain some text")
        experts = self._loads.shape[1]
        shares, places = self._flow.flatten().topk(min(FLOWS, experts * experts))
        found = torch.cat(
            [self._sums, self._loads.double().flatten(), shares, places.double()]
        ).tolist()
        means = [value / self.tokens for value in found[:12]]
        kl, on_features, quadratic, top1, shift, small, moderate = means[:7]
        weighted, mismatch, any_mismatch, moved_mismatch, drift = means[7:]
        loads, rest = found[12 : 12 + 2 * experts], found[12 + 2 * experts :]
        choices = self.tokens * self.source.gate.top_k
        pairs = zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True)
        return Measured(
            tokens=self.tokens,
            mismatch=mismatch,
            any_mismatch=any_mismatch,
            top1_agreement=top1,
            weighted_overlap=weighted,
            kl=kl,
            kl_on_features=on_features,
            mismatch_on_features=moved_mismatch,
            quadratic=quadratic,
            logit_shift=shift,
            shift_small=small,
            shift_moderate=moderate,
            drift=drift,
            load_source=shares_of(loads[:experts]),
            load=shares_of(loads[experts:]),
            flow=tuple(
                (int(place) // experts, int(place) % experts, share / choices)
                for share, place in pairs
                if share > 0
            ),
        )


def shares_of(counts: list[float]) -> tuple[float, ...]:
    total = math.fsum(counts)
    return tuple(count / total for count in counts) if total else tuple(counts)


def load_entropy(load: tuple[float, ...]) -> float:
    """Entropy of a load as a share of an even load's; 1 is even, 0 is one expert for all."""
    if len(load) < 2:
        return 1.0
    return -math.fsum(p * math.log(p) for p in load if p > 0) / math.log(len(load))


def dead_experts(load_source: tuple[float, ...], load: tuple[float, ...]) -> tuple[int, ...]:
    """Experts that the source uses and the model hardly does."""
    even = 1.0 / max(1, len(load))
    pairs = enumerate(zip(load_source, load, strict=True))
    return tuple(e for e, (was, now) in pairs if was >= FAIR * even and now < DEAD * even)


def overloaded_experts(load_source: tuple[float, ...], load: tuple[float, ...]) -> tuple[int, ...]:
    """Experts with much more work than their source gives them, and than an even share."""
    even = 1.0 / max(1, len(load))
    pairs = enumerate(zip(load_source, load, strict=True))
    return tuple(e for e, (was, now) in pairs if now >= OVERLOADED * max(was, even))


class ChoiceComparison:
    """The mismatch alone: what a swap of routers is measured by."""

    def __init__(self, source: RouterView, model: RouterView) -> None:
        self.source = source
        self.model = model
        self.missed: Tensor | None = None  # a sum over tokens

    def add(self, own_features: Tensor, features: Tensor) -> None:
        wanted = self.source.chosen(self.source.logits(own_features))
        made = self.model.chosen(self.model.logits(features))
        missed = missed_share(wanted, made, self.source.gate.top_k).sum()
        self.missed = missed if self.missed is None else self.missed + missed
