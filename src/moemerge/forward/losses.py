"""The next-token loss of streamed models, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch
from moemerge.text.domains import Domain

# Tokens whose logits are converted to float32 at once.
LOSS_TOKENS: Final = 512


@dataclass(frozen=True)
class MeanLoss:
    """A mean over tokens, and its standard error: None for a single document."""

    value: float
    error: float | None


@dataclass(frozen=True)
class DocumentLosses:
    """The summed loss of each document in nats, and its number of predicted tokens."""

    sums: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def mean(self) -> MeanLoss:
        """The mean over all tokens.

        The error is that of a ratio of sums over documents, so that tokens of one document do not
        count as independent.
        """
        count, tokens = len(self.sums), self.total_tokens
        value = math.fsum(self.sums) / tokens
        if count < 2:
            return MeanLoss(value, None)
        pairs = zip(self.sums, self.tokens, strict=True)
        squares = math.fsum((total - value * n) ** 2 for total, n in pairs)
        return MeanLoss(value, math.sqrt(squares * count / (count - 1)) / tokens)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each document's mean loss and number of tokens as plain data."""
        for number, (total, tokens) in enumerate(zip(self.sums, self.tokens, strict=True), start=1):
            yield {"document": number, "loss": total / tokens, "tokens": tokens}

    def minus(self, other: DocumentLosses) -> DocumentLosses:
        """Return the differences on the same documents: the error of their mean is paired."""
        assert self.tokens == other.tokens
        sums = (a - b for a, b in zip(self.sums, other.sums, strict=True))
        return DocumentLosses(tuple(sums), self.tokens)


class NextTokenLoss:
    """The next-token cross-entropy of every row in nats, summed on the device.

    If rows have a prompt and an answer, only the answer's tokens count.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # By domain: the places of a batch's rows, their sums and their numbers of tokens.
        self._parts: dict[str, list[tuple[tuple[int, ...], Tensor, Tensor]]] = {}

    def add(self, batch: Batch, logits: Tensor) -> None:
        """Add a batch's logits, (rows, length, vocabulary). Padding is excluded."""
        counted = batch.mask[:, 1:] & batch.mask[:, :-1]  # (rows, length - 1), on the host
        if batch.answers is not None:
            counted &= batch.answers[:, 1:]
        ids = batch.input_ids.to(logits.device)
        weights = counted.to(logits.device)
        sums = torch.zeros(len(ids), dtype=torch.float64, device=logits.device)
        length = ids.shape[1] - 1
        rows = max(1, LOSS_TOKENS // max(1, length))
        for first in range(0, ids.shape[0], rows):
            for begin in range(0, length, LOSS_TOKENS):
                part = (slice(first, first + rows), slice(begin, min(begin + LOSS_TOKENS, length)))
                wanted = ids[:, 1:][part]  # (rows, tokens)
                losses = functional.cross_entropy(
                    logits[part].float().flatten(0, 1), wanted.flatten(), reduction="none"
                ).view_as(wanted)
                sums[part[0]] += losses.masked_fill(~weights[part], 0.0).double().sum(dim=1)
        self._parts.setdefault(batch.domain, []).append((batch.places, sums, counted.sum(dim=1)))

    def rows(self, domain: str) -> dict[int, tuple[float, int]]:
        """Return the sum and the number of tokens of every row by its place, from all ranks."""
        own = [
            (place, total, count)
            for places, sums, counts in self._parts.get(domain, ())
            for place, total, count in zip(places, sums.tolist(), counts.tolist(), strict=True)
        ]
        return {at: (s, n) for part in self._ranks.gather(own) for at, s, n in sorted(part)}

    def mean(self, domain: str) -> float | None:
        """Return the mean over all tokens and ranks; None if no token has a successor."""
        rows = self.rows(domain).values()
        tokens = sum(count for _, count in rows)
        return math.fsum(total for total, _ in rows) / tokens if tokens else None

    def documents(self, domain: Domain) -> DocumentLosses | None:
        """Return the losses of a domain by document: by its groups, or else by row.

        Documents without a predicted token are left out; None if there is no other.
        """
        rows = self.rows(domain.name)
        totals: dict[int | str, tuple[float, int]] = {}
        for place in sorted(rows):
            key = domain.groups[place] if domain.groups else place
            total, tokens = totals.get(key, (0.0, 0))
            totals[key] = (total + rows[place][0], tokens + rows[place][1])
        kept = [(total, tokens) for total, tokens in totals.values() if tokens]
        if not kept:
            return None
        return DocumentLosses(tuple(s for s, _ in kept), tuple(n for _, n in kept))
