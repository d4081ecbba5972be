"""What the figures amount to: a sentence and three numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from moemerge.diagnosis.results import MODEL, DomainTotal, KeyNumber, Verdict

# Mean mismatch up to which a verdict holds. Rounding to bfloat16 alone moves a few in a thousand
# choices; the paper calls a merge with half of them moved broken down.
INTACT: Final = 0.02
SLIGHT: Final = 0.10
DAMAGED: Final = 0.25
# Domains whose mismatch differs by less need no telling apart.
UNLIKE: Final = 0.02


def judge(totals: Sequence[DomainTotal], names: Mapping[str, str] | None = None) -> Verdict:
    """The diagnosed model in a sentence and three numbers, means over the domains.

    `names` are what models are called, where that is not their name in the totals.
    """
    own = totals_of(totals, MODEL)
    mismatch = mean([total.mismatch for total in own])
    touched = mean([total.any_mismatch for total in own])
    gap = loss_gap(own)
    third = (
        KeyNumber("KL of the routing", kl := mean([total.kl for total in own]), f"{kl:.3g}")
        if gap is None
        else KeyNumber("next-token loss above the sources'", gap, f"{gap:+.3f} nats")
    )
    return Verdict(
        " ".join([_state(own, mismatch), *_compared(totals, mismatch, names or {})]),
        (
            KeyNumber("expert choices that differ", mismatch, percent(mismatch)),
            KeyNumber("tokens with a changed choice in some layer", touched, percent(touched)),
            third,
        ),
    )


def _state(own: Sequence[DomainTotal], mismatch: float) -> str:
    if routes_exactly(own):
        return "The model routes exactly as its sources do."
    worst = max(own, key=lambda total: total.mismatch)
    told = worst.mismatch - mismatch > UNLIKE
    where = f", worst on {worst.domain} ({percent(worst.mismatch)})" if told else ""
    share = f"{percent(mismatch)} of the sources' expert choices are not made{where}."
    if mismatch <= INTACT:
        return f"The routing is intact: {share}"
    if mismatch <= SLIGHT:
        return f"The routing has shifted a little: {share}"
    if mismatch <= DAMAGED:
        return f"The routing is damaged: {share}"
    return f"The routing has broken down: {share}"


def _compared(
    totals: Sequence[DomainTotal], mismatch: float, names: Mapping[str, str]
) -> list[str]:
    """How the best of the models beside it does."""
    best = best_other(totals)
    if best is None:
        return []
    theirs = mean([total.mismatch for total in totals_of(totals, best)])
    name, share = names.get(best, best), percent(theirs)
    if share == percent(mismatch):
        return [f"{name} does no better: {share}."]
    if theirs < mismatch:
        return [f"{name} does better: {share}."]
    several = len({total.model for total in totals}) > 2
    return [
        f"The others do worse; the best of them is {name}: {share}."
        if several
        else f"{name} does worse: {share}."
    ]


# --- figures of a model -------------------------------------------------------------------------


def totals_of(totals: Sequence[DomainTotal], model: str) -> list[DomainTotal]:
    return [total for total in totals if total.model == model]


def best_other(totals: Sequence[DomainTotal]) -> str | None:
    """Of the models beside the diagnosed one, that with the least mismatch."""
    others = dict.fromkeys(total.model for total in totals if total.model != MODEL)
    return min(
        others,
        key=lambda name: mean([total.mismatch for total in totals_of(totals, name)]),
        default=None,
    )


def routes_exactly(own: Sequence[DomainTotal]) -> bool:
    return all(total.mismatch == 0 and total.kl == 0 for total in own)


def loss_gap(own: Sequence[DomainTotal]) -> float | None:
    """How far the next-token loss lies above the sources', in nats; None where none is known."""
    gaps = [
        total.loss - total.loss_source
        for total in own
        if total.loss is not None and total.loss_source is not None
    ]
    return mean(gaps) if gaps else None


def percent(share: float) -> str:
    """`12.3%`, or as many digits as it takes where it is small."""
    if share == 0 or abs(share) >= 0.0005:
        return f"{share:.1%}"
    return f"{100 * share:.1g}%"


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
