"""Next-token loss, reduced batch by batch: logits are never held."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moemerge.text.batches import Batch

# Tokens whose logits are widened to float32 at once.
LOSS_TOKENS: Final = 512


class NextTokenLoss:
    """Mean cross-entropy in nats of each domain's next tokens, summed on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, batch: Batch, logits: Tensor) -> None:
        """A batch's logits, (rows, length, vocabulary); padding neither predicts nor counts."""
        counted = batch.mask[:, 1:] & batch.mask[:, :-1]  # (rows, length - 1), on the host
        count = int(counted.sum())
        if count == 0:
            return
        ids = batch.input_ids.to(logits.device)
        weights = counted.to(logits.device)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        length = ids.shape[1] - 1
        rows = max(1, LOSS_TOKENS // length)
        for first in range(0, ids.shape[0], rows):
            for begin in range(0, length, LOSS_TOKENS):
                part = (slice(first, first + rows), slice(begin, min(begin + LOSS_TOKENS, length)))
                wanted = ids[:, 1:][part]  # (rows, tokens)
                losses = functional.cross_entropy(
                    logits[part].float().flatten(0, 1), wanted.flatten(), reduction="none"
                )
                total += losses.masked_fill(~weights[part].flatten(), 0.0).double().sum()
        before = self._sums.get(batch.domain)
        self._sums[batch.domain] = total if before is None else before + total
        self._counts[batch.domain] = self._counts.get(batch.domain, 0) + count

    def mean(self, domain: str) -> float | None:
        """None where no token has a next one."""
        if domain not in self._sums:
            return None
        return float(self._sums[domain]) / self._counts[domain]
