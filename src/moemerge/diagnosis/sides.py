"""The models of a diagnosis as they are run, and the loss of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from moemerge.diagnosis.job import DiagnosisJob, vocabulary
from moemerge.diagnosis.results import MODEL
from moemerge.lockstep.overlay import with_routers_of
from moemerge.lockstep.streams import Need, Side
from moemerge.text.batches import Batch

# Tokens whose logits are widened to float32 at once.
LOSS_TOKENS: Final = 512
# Logits, scores, probabilities and masks of a batch while it is compared, all (tokens, K) float64.
COMPARED_COPIES = 24


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


@dataclass(frozen=True)
class MeasuredSide(Side):
    """A model that is run to its end, where its loss is measured."""

    loss: NextTokenLoss = field(default_factory=NextTokenLoss)

    @property
    def on_output(self) -> Callable[[Batch, Tensor], None]:
        return self.loss.add


@dataclass(frozen=True)
class SwappedSide(MeasuredSide):
    """A model with another's routers, run on the domain of the source that is part of it."""

    weights_of: str = MODEL
    routers_of: str = MODEL


def sides_of(job: DiagnosisJob) -> dict[str, MeasuredSide]:
    """Every model that is run, by name; the diagnosed one first."""
    sides: dict[str, MeasuredSide] = {model.name: MeasuredSide(model) for model in job.subjects}
    for name, source in job.sources.items():
        sides[name] = MeasuredSide(source, name)
    if job.request.settings.swaps:
        for name, source in job.sources.items():
            for weights, routers in ((job.model, source), (source, job.model)):
                sides[f"{name}: {weights.name} with the routers of {routers.name}"] = SwappedSide(
                    with_routers_of(weights, routers),
                    name,
                    weights_of=weights.name,
                    routers_of=routers.name,
                )
    return sides


def memory_need(job: DiagnosisJob, sides: Mapping[str, Side]) -> Need:
    """The larger of one batch's logits over the vocabulary and one batch's comparison."""
    largest = max(batch.input_ids.numel() for batch in job.batches)
    words = vocabulary(job.model)
    logits = largest * words * job.stream.dtype.itemsize + 2 * 4 * LOSS_TOKENS * words
    experts = max(pair.info.rows for pair in job.routers.pairs)
    hints = ["lower --max-tokens or --max-length"]
    if job.request.settings.swaps:
        hints.append("--no-swaps runs half as many models")
    if len(job.subjects) > 1:
        hints.append("diagnose the models one by one, without --against")
    extra = max(logits, COMPARED_COPIES * 8 * largest * experts)
    return Need(f"diagnosis of {len(sides)} models side by side", extra, hints)
