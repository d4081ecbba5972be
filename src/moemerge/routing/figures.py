"""Routing figures: how a model's choices of experts compare with those of a source.

A figure is declared once, by a decorated function here. What is measured, the JSON document, the
tables, the page and the table in docs/diagnosis.md all follow from the declaration:

    @of_tokens    a value for each token; a router has its mean over the tokens, a domain the mean
                  of that over the routers
    @of_choices   of how often each expert was chosen, and by which tokens' loss
    @of_routers   of a domain, from the figures of all its routers
    given         of a domain, measured elsewhere: words alone

Everything after the logits is float64, since a divergence is of second order in differences that
may be small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from moemerge.families.rules import Gate
from moemerge.routing.gates import (
    Curvature,
    divergence,
    is_bernoulli,
    log_probabilities,
    select,
    slope,
    token_weights,
)
from moemerge.runtime.formatting import FigureWords, Quantity

# The paper's bounds for the relative logit shift of Lemma 1's neighbourhood.
SMALL_SHIFT: Final = 0.1
MODERATE_SHIFT: Final = 0.2
# Number of pairs of experts in the flow: enough for a chart, few enough for a document.
FLOWS: Final = 40
# An expert is idle below this share of an even load, if its source gave it a fair one.
DEAD: Final = 0.05
FAIR: Final = 0.25
# An expert is overloaded above these multiples of its source's load and of an even load.
OVERLOADED: Final = 2.0
# Avoids 0 / 0; representable in float32, the dtype of logits and features.
TINY: Final = torch.finfo(torch.float32).tiny


# --- inputs of figures --------------------------------------------------------------------------


@dataclass(frozen=True)
class RouterOutput:
    """A router's output for some tokens; quantities that several figures share are cached."""

    gate: Gate
    logits: Tensor  # (tokens, K), at least float32
    selection_bias: Tensor | None = None  # (K,), changes the selection only

    @cached_property
    def wide(self) -> Tensor:
        """The logits in float64."""
        return self.logits.double()

    @cached_property
    def log_p(self) -> Tensor:
        return log_probabilities(self.gate, self.wide)

    @cached_property
    def p(self) -> Tensor:
        return self.log_p.exp()

    @cached_property
    def chosen(self) -> Tensor:
        """The experts that each token is sent to: (tokens, K), bool."""
        experts = select(self.gate, self.logits, self.selection_bias)
        return torch.zeros_like(self.logits, dtype=torch.bool).scatter_(1, experts, value=True)


@dataclass(frozen=True)
class Tokens:
    """Some tokens at one router of a source and of a model."""

    source: RouterOutput  # the source's router on the source's features: the target
    model: RouterOutput  # the model's router on the model's features: the actual routing
    moved: RouterOutput  # the source's router on the model's features: only the routers differ
    features: tuple[Tensor, Tensor] | None = None  # the source's and the model's, (tokens, d)

    @property
    def count(self) -> int:
        return self.model.logits.shape[0]

    @cached_property
    def lost(self) -> Tensor:
        """Choices of the source that the model does not make, (tokens, K) bool."""
        return self.source.chosen.logical_and(self.model.chosen.logical_not())

    @cached_property
    def shift(self) -> Tensor:
        """The relative distance of the two routers' logits on the model's features, (tokens,)."""
        return relative_gap(self.model.logits, self.moved.logits)


@dataclass(frozen=True)
class Choices:
    """How often each expert was chosen, as shares of all choices."""

    load_source: tuple[float, ...]
    load: tuple[float, ...]
    flow: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures over some tokens, by name; `measured.kl` is `measured.figures["kl"]`."""

    tokens: int
    choices: int  # of the source: Top-k of each token
    figures: Mapping[str, Any]

    @property
    def top_k(self) -> int:
        return self.choices // self.tokens

    def __getattr__(self, name: str) -> Any:
        # `figures` itself does not exist yet while an object is copied.
        if name != "figures" and name in self.figures:
            return self.figures[name]
        raise AttributeError(f"{type(self).__name__} has no figure {name!r}")

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self.figures]


# --- declarations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure(FigureWords):
    """A figure and the function that computes it; without one it is measured elsewhere."""

    of_tokens: Callable[[Tokens], Tensor] | None = None  # (tokens,), float64
    of_choices: Callable[[Choices], Any] | None = None
    of_routers: Callable[[Sequence[Measured]], float] | None = None
    averaged: bool = True  # for figures of tokens: a domain's value is the mean over its routers


FIGURES: Final[dict[str, Figure]] = {}
Declared = TypeVar("Declared", bound=Callable[..., Any])


def given(
    name: str, heading: str, meaning: str, quantity: Quantity = Quantity.SHARE, **more: Any
) -> None:
    FIGURES[name] = Figure(name, heading, meaning, quantity, **more)


def _declared(kind: str) -> Callable[..., Callable[[Declared], Declared]]:
    """Return a decorator that declares a function as a figure, described by `given`."""

    def with_words(*words: Any, **more: Any) -> Callable[[Declared], Declared]:
        def declare(function: Declared) -> Declared:
            given(function.__name__, *words, **{kind: function, **more})
            return function

        return declare

    return with_words


of_tokens, of_choices, of_routers = map(_declared, ("of_tokens", "of_choices", "of_routers"))


def total_figures(routers: Sequence[Measured], **measured: float | None) -> dict[str, Any]:
    """Return a domain's figures, from those of its routers and those in `measured`."""
    totals: dict[str, Any] = {}
    for name, figure in FIGURES.items():
        if name in measured:
            totals[name] = measured[name]
        elif figure.of_routers:
            totals[name] = figure.of_routers(routers)
        elif figure.of_tokens and figure.averaged:
            totals[name] = math.fsum(router.figures[name] for router in routers) / len(routers)
    return totals


# --- the figures, in display order --------------------------------------------------------------


@of_tokens(
    "mismatch", "share of the source's Top-k choices that the model does not make", summary=True
)
def mismatch(tokens: Tokens) -> Tensor:
    return missed_share(tokens.lost, tokens.source)


@of_tokens(
    "tokens hit",
    "share of tokens with a choice that is not made; in the totals, at any router",
    averaged=False,
)
def any_mismatch(tokens: Tokens) -> Tensor:
    return tokens.lost.any(dim=-1).double()


@of_routers(
    "per token",
    "choices of a token, over all routers, that are not made",
    Quantity.COUNT,
    summary=True,
    out_of="choices_per_token",
)
def mismatched_per_token(routers: Sequence[Measured]) -> float:
    return math.fsum(router.mismatch * router.top_k for router in routers)


@of_routers("choices", "choices of a token, over all routers", Quantity.COUNT, minor=True)
def choices_per_token(routers: Sequence[Measured]) -> int:
    return sum(router.top_k for router in routers)


@of_routers(
    "layers hit",
    "routers at which a token's set of experts differs at all",
    Quantity.COUNT,
    minor=True,
)
def mismatched_layers_per_token(routers: Sequence[Measured]) -> float:
    return math.fsum(router.any_mismatch for router in routers)


@of_tokens(
    "KL",
    "KL(source ‖ model) of the routing distributions over all experts, each on its own features",
    Quantity.NATS,
    summary=True,
)
def kl(tokens: Tokens) -> Tensor:
    return divergence_of(tokens.source, tokens.model)


@of_tokens(
    "KL, routers alone",
    "KL with both routers on the model's features: what the routers themselves do, and "
    "calibration can repair",
    Quantity.NATS,
    summary=True,
)
def kl_on_features(tokens: Tokens) -> Tensor:
    return divergence_of(tokens.moved, tokens.model)


@of_tokens("mismatch, routers alone", "mismatch with both routers on the model's features")
def mismatch_on_features(tokens: Tokens) -> Tensor:
    lost = tokens.moved.chosen.logical_and(tokens.model.chosen.logical_not())
    return missed_share(lost, tokens.moved)


@of_tokens("top-1 same", "share of tokens whose highest logit is the same expert's")
def top1_agreement(tokens: Tokens) -> Tensor:
    best, ours = (routing.logits.argmax(dim=-1) for routing in (tokens.source, tokens.model))
    return (best == ours).double()


@of_tokens("overlap", "Σ min(w, w'), the chosen experts' weights w scaled to sum to 1")
def weighted_overlap(tokens: Tokens) -> Tensor:
    # As 1 − ½ Σ |w − w'|, which is exact for w = w'.
    shares = []
    for routing in (tokens.source, tokens.model):
        weights = routing.p * routing.chosen
        shares.append(weights.div_(weights.sum(dim=-1, keepdim=True).clamp_min_(TINY)))
    return 1.0 - 0.5 * shares[0].sub_(shares[1]).abs_().sum(dim=-1)


@of_tokens("drift", "‖x − x'‖ / ‖x'‖ of the router's input in the model, x, and in the source, x'")
def drift(tokens: Tokens) -> Tensor:
    assert tokens.features is not None, "drift compares features"
    wide = torch.promote_types(tokens.features[0].dtype, torch.float32)
    own, features = (x.to(wide) for x in tokens.features)
    return relative_gap(features, own)


@of_tokens(
    "logit shift",
    "‖z − z'‖ / ‖z'‖ of the logits that the model's router, z, and the source's, z', give the "
    "model's features",
    Quantity.RATIO,
)
def logit_shift(tokens: Tokens) -> Tensor:
    return tokens.shift


@of_tokens("shift < 0.1", "share of tokens with a logit shift below 0.1", minor=True)
def shift_small(tokens: Tokens) -> Tensor:
    return (tokens.shift < SMALL_SHIFT).double()


@of_tokens("shift < 0.2", "share of tokens with a logit shift below 0.2", minor=True)
def shift_moderate(tokens: Tokens) -> Tensor:
    return (tokens.shift < MODERATE_SHIFT).double()


@of_tokens(
    "quadratic",
    "the second-order model of the KL of the routers alone (Lemma 1), which calibration minimises",
    Quantity.NATS,
    minor=True,
)
def quadratic(tokens: Tokens) -> Tensor:
    # ½ δᵀ H δ with H = D_g (diag p − ppᵀ) D_g at the source's router
    at = tokens.moved
    gap = tokens.model.wide - at.wide
    if is_bernoulli(at.gate):
        curved = token_weights(at.gate, at.wide, Curvature.FULL, torch.float64).apply(gap)
        return 0.5 * vecdot(gap, curved)
    g = slope(at.gate, at.wide)
    v = gap if g is None else g * gap
    return 0.5 * (vecdot(at.p * v, v) - vecdot(at.p, v) ** 2)


@of_choices("source's load", "share of the source's choices that each expert gets", Quantity.DATA)
def load_source(choices: Choices) -> tuple[float, ...]:
    return choices.load_source


@of_choices("load", "share of the model's choices that each expert gets", Quantity.DATA)
def load(choices: Choices) -> tuple[float, ...]:
    return choices.load


@of_choices(
    "source's entropy",
    "entropy of the source's load as a share of its largest value; an even load has 100%",
    minor=True,
)
def entropy_source(choices: Choices) -> float:
    return load_entropy(choices.load_source)


@of_choices("entropy", "entropy of the model's load, likewise", minor=True)
def entropy(choices: Choices) -> float:
    return load_entropy(choices.load)


@of_choices(
    "idle",
    "experts with less than 1/20 of an even load whose source gives them at least 1/4 of one",
    Quantity.EXPERTS,
)
def dead(choices: Choices) -> tuple[int, ...]:
    even = 1.0 / max(1, len(choices.load))
    pairs = enumerate(zip(choices.load_source, choices.load, strict=True))
    return tuple(e for e, (was, now) in pairs if was >= FAIR * even and now < DEAD * even)


@of_choices(
    "overloaded", "experts with twice their source's load, and twice an even one", Quantity.EXPERTS
)
def overloaded(choices: Choices) -> tuple[int, ...]:
    even = 1.0 / max(1, len(choices.load))
    pairs = enumerate(zip(choices.load_source, choices.load, strict=True))
    return tuple(e for e, (was, now) in pairs if now >= OVERLOADED * max(was, even))


@of_choices(
    "flow",
    f"which experts lost choices to which, the {FLOWS} largest flows: [lost, taken, share of all "
    "choices]; all flows together, listed or not, are the mismatch",
    Quantity.DATA,
)
def flow(choices: Choices) -> tuple[tuple[int, int, float], ...]:
    return choices.flow


given(
    "loss",
    "loss",
    "next-token loss on the domain's text, in nats; of the answers if rows have them",
    Quantity.LOSS,
    summary=True,
)
given(
    "loss_source",
    "source's loss",
    "next-token loss of the domain's source on that text",
    Quantity.LOSS,
    summary=True,
)


# --- mathematics --------------------------------------------------------------------------------


def missed_share(lost: Tensor, source: RouterOutput) -> Tensor:
    """Return the share of each token's choices that were lost, (tokens,) float64."""
    return lost.sum(dim=-1).double() / source.gate.top_k


def divergence_of(target: RouterOutput, model: RouterOutput) -> Tensor:
    """Return KL(target ‖ model) of each token, (tokens,)."""
    if is_bernoulli(target.gate):
        return divergence(target.gate, target.wide, model.wide)
    return vecdot(target.p, target.log_p - model.log_p)


def vecdot(a: Tensor, b: Tensor) -> Tensor:
    """Return Σ a b of each row, (tokens,)."""
    return (a * b).sum(dim=-1)


def relative_gap(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a − b‖ / ‖b‖ of each row, (tokens,) float64; 0 if both are 0."""
    gap: Tensor = torch.linalg.vector_norm(a - b, dim=-1).double()
    size: Tensor = torch.linalg.vector_norm(b, dim=-1).double()
    return gap / size.clamp_min(TINY)


def load_entropy(load: tuple[float, ...]) -> float:
    """Return the normalised entropy: 1 for an even load, 0 if one expert takes all."""
    if len(load) < 2:
        return 1.0
    return -math.fsum(p * math.log(p) for p in load if p > 0) / math.log(len(load))
