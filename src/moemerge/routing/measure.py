"""Measure routing figures, summed block by block on the device; the problem of one router."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moemerge.errors import DataError
from moemerge.families.rules import Gate
from moemerge.routing.figures import (
    FIGURES,
    FLOWS,
    Choices,
    Measured,
    RouterOutput,
    Tokens,
)
from moemerge.routing.gates import divergence
from moemerge.routing.products import DomainFeatures, chunks_of, features_of
from moemerge.runtime.ranks import SINGLE, Ranks

# All figures of a router, and those in a calibration's report.
ROUTER_FIGURES = tuple(n for n, f in FIGURES.items() if f.of_tokens or f.of_choices)
CALIBRATION_FIGURES = ("mismatch", "kl", "quadratic", "top1_agreement")


@dataclass(frozen=True)
class RouterView:
    """A router of a loaded model, on the model's device."""

    gate: Gate
    weight: Tensor  # (K, d)
    bias: Tensor | None  # (K,), added to the logits
    selection_bias: Tensor | None  # (K,), changes the selection only
    # From the logits of W to those of fewer experts, for a source with more than the model.
    combine: Callable[[Tensor], Tensor] | None = None

    def logits(self, features: Tensor) -> Tensor:
        """Return W x + b for features (tokens, d): (tokens, K), at least float32."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = functional.linear(features.to(dtype), self.weight.to(dtype), bias)
        return logits if self.combine is None else self.combine(logits)

    def route(self, features: Tensor) -> RouterOutput:
        return RouterOutput(self.gate, self.logits(features), self.selection_bias)


def compare(
    source: RouterView, model: RouterView, own_features: Tensor, features: Tensor
) -> Tokens:
    """Pair the same tokens' router inputs in the source and in the model, (tokens, d) each."""
    if own_features.shape != features.shape:
        raise DataError(
            f"router inputs of shape {tuple(own_features.shape)} in the source and "
            f"{tuple(features.shape)} in the model"
        )
    return Tokens(
        source=source.route(own_features),
        model=model.route(features),
        moved=source.route(features),
        features=(own_features, features),
    )


class FigureSums:
    """Sums figures over blocks of tokens; synchronises with the device once, at the end."""

    def __init__(self, names: Iterable[str] = ROUTER_FIGURES, ranks: Ranks = SINGLE) -> None:
        figures = [FIGURES[name] for name in names]
        self._of_tokens = {f.name: f.of_tokens for f in figures if f.of_tokens}
        self._of_choices = {f.name: f.of_choices for f in figures if f.of_choices}
        self._ranks = ranks
        self._tokens = self._choices = 0
        # Figures of tokens, (figures,); if choices are counted, also loads (2, K), flow (K, K).
        self._sums: list[Tensor] = []

    def add(self, tokens: Tokens) -> None:
        parts = [torch.stack([figure(tokens).sum() for figure in self._of_tokens.values()])]
        if self._of_choices:
            parts += _choice_sums(tokens)
        self._sums = (
            [a + b for a, b in zip(self._sums, parts, strict=True)] if self._sums else parts
        )
        self._tokens += tokens.count
        self._choices += tokens.count * tokens.source.gate.top_k

    def result(self) -> Measured:
        """Return the figures so far; this synchronises with the device."""
        if not self._tokens:
            raise DataError("routing figures over no token", hint="give the domain some text")
        self._ranks.all_reduce(*self._sums)
        device, count = self._sums[0].device, len(self._of_tokens)
        self._tokens, self._choices = (
            self._ranks.total(number, device) for number in (self._tokens, self._choices)
        )
        numbers = torch.cat([self._sums[0], *_largest_flows(*self._sums[1:])]).tolist()
        values: dict[str, Any] = {
            name: value / self._tokens
            for name, value in zip(self._of_tokens, numbers[:count], strict=True)
        }
        if self._of_choices:
            experts = self._sums[1].shape[1]
            choices = _choices(numbers[count:], experts, self._choices)
            values |= {name: figure(choices) for name, figure in self._of_choices.items()}
        ordered = {name: values[name] for name in FIGURES if name in values}
        return Measured(tokens=self._tokens, choices=self._choices, figures=ordered)


def _choice_sums(tokens: Tokens) -> list[Tensor]:
    """Return how often each expert is chosen, (2, K), and the flow between experts, (K, K).

    A lost choice counts in equal parts for the experts that the token is sent to instead.
    """
    wanted, made = tokens.source.chosen, tokens.model.chosen
    taken = made.logical_and(wanted.logical_not()).float()
    takers = taken.sum(dim=-1, keepdim=True).clamp_min(1.0)
    flow = (tokens.lost.float().T @ (taken / takers)).double()
    return [torch.stack([wanted.sum(dim=0), made.sum(dim=0)]), flow]


def _largest_flows(loads: Tensor | None = None, flow: Tensor | None = None) -> list[Tensor]:
    """Return the loads, the largest flows and their positions in `flow`, as float64 vectors."""
    if loads is None or flow is None:
        return []
    shares, pairs = flow.flatten().topk(min(FLOWS, flow.numel()))
    return [loads.double().flatten(), shares, pairs.double()]


def _choices(numbers: list[float], experts: int, choices: int) -> Choices:
    loads, rest = numbers[: 2 * experts], numbers[2 * experts :]
    flows = zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True)
    return Choices(
        load_source=_shares(loads[:experts]),
        load=_shares(loads[experts:]),
        flow=tuple(
            (int(pair) // experts, int(pair) % experts, share / choices)
            for share, pair in flows
            if share > 0
        ),
    )


def _shares(counts: list[float]) -> tuple[float, ...]:
    total = math.fsum(counts)
    return tuple(count / total for count in counts) if total else tuple(counts)


# --- routers on a domain's features -------------------------------------------------------------


def measure_routers(
    gate: Gate,
    domain: DomainFeatures,
    weights: Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    target_bias: Tensor | None = None,
) -> list[Measured]:
    """Measure how several routers agree with the domain's target, in one pass over the domain.

    Both use the domain's features, unless the target is a source's own routing. The selection
    biases may differ: a merged model has its own.
    """
    sums = [FigureSums(CALIBRATION_FIGURES, domain.ranks) for _ in weights]
    device = domain.features[0].device
    target_router, *routers = (w.to(device) for w in (domain.router, *weights))
    for x, given in chunks_of(domain):
        features = features_of(x, target_router.shape[1])
        wanted = features.working_logits(target_router) if given is None else given
        target = RouterOutput(gate, wanted, target_bias)
        for one, router in zip(sums, routers, strict=True):
            logits = features.working_logits(router)
            one.add(Tokens(target, RouterOutput(gate, logits, bias), moved=target))
    return [one.result() for one in sums]


@dataclass(frozen=True)
class RouterProblem:
    """A merged router on the tokens of every domain, and the sources' routing to match."""

    gate: Gate
    merged: Tensor  # (K, d), or (K, d + 1) with the bias as last column; float64
    domains: Sequence[DomainFeatures]
    holdout: Sequence[DomainFeatures]  # measured, never solved on
    dtypes: tuple[torch.dtype, torch.dtype | None]  # of the stored weight and bias
    selection_bias: Tensor | None = None
    # Selection biases of the sources by domain.
    source_biases: Mapping[str, Tensor | None] = field(default_factory=dict)

    def divergences(self, domains: Sequence[DomainFeatures], weight: Tensor) -> dict[str, float]:
        """Return the mean KL(source ‖ router) of each domain."""
        divergences = {}
        for domain in domains:
            total = torch.zeros((), dtype=torch.float64, device=weight.device)
            for at, x in enumerate(domain.features):
                features = features_of(x, weight.shape[1])
                target = (
                    features.working_logits(domain.router.to(x.device))
                    if domain.targets is None
                    else domain.targets[at]
                )
                mine = features.working_logits(weight.to(x.device))
                total += divergence(self.gate, target.double(), mine.double()).sum()
            tokens = domain.ranks.total(domain.tokens, weight.device)
            summed = domain.ranks.sum_of(float(total), weight.device)
            divergences[domain.name] = summed / max(1, tokens)
        return divergences
