"""Perplexity of plain text: each model's loss, and every pair compared by documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from moemerge.lab.significance import (
    ALPHA,
    drawn_means,
    flipped_means,
    interval,
    two_sided,
)
from moemerge.runtime.formatting import LEAST_P, p_value, perplexity

if TYPE_CHECKING:
    from moemerge.forward.losses import DocumentLosses


@dataclass(frozen=True)
class LossScore:
    """A model's mean loss in nats a token, with its error and interval over documents."""

    loss: float
    error: float | None
    interval: tuple[float, float] | None

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class LossDifference:
    """The second model's loss minus the first's on the same documents, in nats a token."""

    first: str
    second: str
    difference: float
    error: float | None
    interval: tuple[float, float] | None
    p: float  # two-sided, by swapping the two models at random on each document
    won: int  # documents that the second predicts better
    lost: int
    draws: int

    @property
    def p_text(self) -> str:
        return p_value(self.p, max(LEAST_P, 1 / self.draws))

    @property
    def significant(self) -> bool:
        return self.p < ALPHA

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "p_text": self.p_text, "significant": self.significant}


@dataclass(frozen=True)
class TextPerplexity:
    """The losses of all models on one text. Models with another tokenizer are not compared."""

    name: str
    documents: Mapping[str, DocumentLosses]  # by model
    scores: Mapping[str, LossScore]
    pairs: tuple[LossDifference, ...]

    @property
    def tokens(self) -> int:
        """Predicted tokens, by the first model's tokenizer."""
        return next(iter(self.documents.values())).total_tokens

    @property
    def size(self) -> int:
        """The number of documents."""
        return len(next(iter(self.documents.values())).sums)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "documents": self.size,
            "tokens": self.tokens,
            "scores": {model: score.to_json() for model, score in self.scores.items()},
            "pairs": [pair.to_json() for pair in self.pairs],
        }


def text_headline(text: TextPerplexity) -> str:
    """Return who predicts a text best, as far as the paired test tells."""
    best = min(text.scores, key=lambda model: text.scores[model].loss)
    shown = f"perplexity {text.scores[best].perplexity:.4g} on {text.name}"
    alike = [
        pair.first if pair.second == best else pair.second
        for pair in text.pairs
        if best in (pair.first, pair.second) and not pair.significant
    ]
    if alike:
        return f"{best} has {shown}, but is not distinguishable from {', '.join(alike)}"
    return f"{best} predicts best: {shown}" if len(text.scores) > 1 else f"{best}: {shown}"


def compare_losses(
    name: str,
    found: Mapping[str, DocumentLosses],
    alike: Sequence[str],
    draws: int,
    rng: np.random.Generator,
) -> TextPerplexity:
    """Return means and differences; intervals draw documents, with all their tokens, again."""
    scores = {}
    for model, own in found.items():
        mean = own.mean
        sums = np.array([own.sums, own.tokens], dtype=np.float64)
        drawn = drawn_means(sums, draws, rng)
        spread = None if mean.error is None else interval(drawn[:, 0] / drawn[:, 1])
        scores[model] = LossScore(mean.value, mean.error, spread)
    pairs = [_pair(first, second, found, draws, rng) for first, second in combinations(alike, 2)]
    return TextPerplexity(name, found, scores, tuple(pairs))


def _pair(
    first: str,
    second: str,
    found: Mapping[str, DocumentLosses],
    draws: int,
    rng: np.random.Generator,
) -> LossDifference:
    gaps = found[second].minus(found[first])
    mean = gaps.mean
    sums = np.array([gaps.sums, gaps.tokens], dtype=np.float64)
    drawn = drawn_means(sums, draws, rng)
    flipped = flipped_means(sums[:1], draws, rng)[:, 0] / sums[1].mean()
    return LossDifference(
        first=first,
        second=second,
        difference=mean.value,
        error=mean.error,
        interval=None if mean.error is None else interval(drawn[:, 0] / drawn[:, 1]),
        p=two_sided(mean.value, flipped),
        won=int((sums[0] < 0).sum()),
        lost=int((sums[0] > 0).sum()),
        draws=draws,
    )
