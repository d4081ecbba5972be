"""The loss on check text, which no fit has used, and whether a source has memorised its text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moemerge.diagnosis.job import DiagnosisJob, MeasuredSide
from moemerge.diagnosis.results import MODEL, CheckLoss
from moemerge.diagnosis.verdict import NOTICEABLE
from moemerge.features.losses import DocumentLosses

# A source has memorised its text if its lead over the merged model shrinks by more than this share
# on check text. The merged model has part of the memory, so the whole lead never disappears: of a
# specialist trained for 25 epochs on 150 rows, 0.30 of 0.51 nats were left.
MEMORISED_SHARE: Final = 0.25
# It must also shrink by more than this number of standard errors.
SURE: Final = 3.0


@dataclass(frozen=True)
class Lead:
    """How much better a source predicts a text than the merged model, in nats a token."""

    value: float
    error: float | None

    @classmethod
    def of(cls, model: DocumentLosses | None, source: DocumentLosses | None) -> Lead | None:
        if model is None or source is None:
            return None
        gap = model.minus(source).mean
        return cls(gap.value, gap.error)


def has_memorised(own: Lead, check: Lead) -> bool:
    """Return whether a source leads far more on its own text than on check text."""
    if own.error is None or check.error is None:
        return False
    shrinks = own.value - check.value
    return shrinks > max(
        NOTICEABLE, MEMORISED_SHARE * own.value, SURE * math.hypot(own.error, check.error)
    )


def check_losses(
    job: DiagnosisJob, sides: Mapping[str, MeasuredSide]
) -> tuple[tuple[CheckLoss, ...], list[str]]:
    """Return the loss of every model on check text, and notices about memorised text."""
    losses: list[CheckLoss] = []
    notices: list[str] = []
    for name, domain in zip(job.request.check, job.text.check, strict=True):
        models = [model.name for model in job.subjects]
        models += [name] if name in job.sources else []
        found = {model: sides[model].loss.documents(domain) for model in models}
        losses += [
            _loss(name, model, len(domain.rows), own, found[MODEL])
            for model, own in found.items()
            if own is not None
        ]
        if name in job.sources:
            (data,) = (d for d in job.domains if d.name == name)
            pair = (sides[model].loss.documents(data) for model in (MODEL, name))
            own, check = Lead.of(*pair), Lead.of(found[MODEL], found[name])
            if own is not None and check is not None and has_memorised(own, check):
                notices.append(_memorised(name, own, check))
    return tuple(losses), notices


def _loss(
    name: str, model: str, rows: int, own: DocumentLosses, first: DocumentLosses | None
) -> CheckLoss:
    mean = own.mean
    change = None if model == MODEL or first is None else own.minus(first).mean
    return CheckLoss(
        name=name,
        model=model,
        rows=rows,
        documents=len(own.sums),
        tokens=own.total_tokens,
        loss=mean.value,
        error=mean.error,
        change=None if change is None else change.value,
        change_error=None if change is None else change.error,
    )


def _memorised(name: str, own: Lead, check: Lead) -> str:
    return (
        f"{name}: the source predicts its calibration text {own.value:.3f} nats a token better "
        f"than the merged model, but the check text only {check.value:.3f}. It was probably "
        "trained on the calibration text, so held-out figures promise too much: calibrate with "
        "text that no source was trained on, and believe the check text"
    )
