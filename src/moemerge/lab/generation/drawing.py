"""Sample the next token from logits, with random numbers that belong to one completion.

A number is a hash of the completion's seed and the step, instead of a generator with a state. So a
completion does not depend on its neighbours in a batch.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from moemerge.config.text_settings import GenerationSettings

# SplitMix64 (Steele, Lea, Flood 2014), in 64-bit integers that wrap around.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX1: Final = 0xBF58476D1CE4E5B9
_MIX2: Final = 0x94D049BB133111EB
_MANTISSA: Final = 53


def uniform(streams: Tensor, steps: Tensor) -> Tensor:
    """Return numbers in [0, 1) for (stream, step) pairs, int64 -> float64."""
    z = streams + (steps + 1) * signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * signed(_MIX1)
    z = (z ^ _shifted(z, 27)) * signed(_MIX2)
    z = z ^ _shifted(z, 31)
    return _shifted(z, 64 - _MANTISSA).double() * 2.0**-_MANTISSA


def signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shift right and fill with zeros; torch's shift fills with the sign bit."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def draw(logits: Tensor, uniforms: Tensor, settings: GenerationSettings) -> Tensor:
    """Sample one token per row, (rows, vocabulary) -> (rows,). Greedy at temperature 0."""
    if settings.temperature == 0:
        return logits.argmax(-1)
    scores = logits.float() / settings.temperature
    if 0 < settings.top_k < scores.shape[-1]:
        least = scores.topk(settings.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if settings.top_p < 1:
        scores = _nucleus(scores, settings.top_p)
    sums = scores.softmax(-1).double().cumsum(-1)
    wanted = (uniforms * sums[..., -1]).unsqueeze(-1)
    place = torch.searchsorted(sums, wanted, right=True).squeeze(-1)
    # A number close to 1 can be rounded past the end.
    return torch.where(place < scores.shape[-1], place, scores.argmax(-1))


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens until their probabilities sum to `top_p`."""
    ordered, order = scores.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return scores.masked_fill(dropped, float("-inf"))
