"""Rank the repairs of a merge by the share of the gap to its sources that each should close."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moemerge.diagnosis.results import MODEL, DomainTotal, LayerDiagnosis, Swap
from moemerge.diagnosis.verdict import INTACT, NOTICEABLE, Overall, overall_totals, won_back
from moemerge.runtime.formatting import percent

# Choices per expert, at an even load, below which loads are noise.
FEW_CHOICES: Final = 20
EXPERTS_NAMED: Final = 6


@dataclass(frozen=True)
class Expected:
    """The share of the gap to the sources that a repair closed.

    It is the mean over measured merges, with the range of four fifths of them.
    """

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})"


# Of merges of synthetic specialists, by the routing KL below which a band lies. Swapped routers
# predict what calibration closes, the KL of the routing does so less well. `evidence/prediction.py`
# and `evidence/swaps.py` fit these numbers and test them on other models.
CALIBRATION: Final = {
    0.15: Expected(0.04, -0.02, 0.11),
    0.3: Expected(0.15, -0.05, 0.52),
    0.5: Expected(0.26, -0.06, 0.63),
    math.inf: Expected(0.55, 0.39, 0.78),
}
REFIT: Final = Expected(0.77, 0.60, 0.90)  # in closed form, synthetic specialists
# By how much less calibration closed than the sources' routers won back (`evidence/swaps.py`).
SHORTFALL: Final = Expected(0.09, 0.04, 0.19)
# What is known of merges on natural text (docs/evidence.md).
NATURAL: Final = {
    "refit --solver gradient": "52% to 101% on natural text",
    "refit": "-1% to 96% on natural text",
    "distill": "27% to 97% on natural text",
    "calibrate": "at most 14% on natural text",
}


def expected_of_calibration(kl: float) -> Expected:
    """Return what `calibrate` closed in merges with such a routing KL, which may be infinite."""
    bands = (expected for below, expected in CALIBRATION.items() if kl < below)
    return next(bands, CALIBRATION[math.inf])


def expected_by_swaps(won_back: float) -> Expected:
    """Return what `calibrate` closed in merges where swapped routers won back this share."""
    shares = (SHORTFALL.share, SHORTFALL.high, SHORTFALL.low)
    return Expected(*(min(won_back, 1.0) - share for share in shares))


@dataclass(frozen=True)
class Measurements:
    """All measurements that the advice is based on."""

    rows: Sequence[LayerDiagnosis]
    totals: Sequence[DomainTotal]
    swaps: Sequence[Swap] = ()
    repaired: Collection[str] = ()  # repairs that the diagnosed model has had: "calibrate", "refit"
    names: Mapping[str, str] = field(default_factory=dict)  # display names of models
    elsewhere: Sequence[DomainTotal] = ()  # on text of domains without a source, against the base
    command: str = ""  # MODEL, sources and text as arguments of a repair


def advise(measured: Measurements) -> tuple[str, ...]:
    """Return the repairs, best first, with a command to paste; then other findings."""
    own = overall_totals(measured.totals)[MODEL]
    findings = [
        *_mispaired(own),
        *_elsewhere(measured),
        *_experts([row for row in measured.rows if row.model == MODEL]),
    ]
    if own.routes_exactly:
        return ("Nothing to repair: no token is routed otherwise than by its source.", *findings)
    gap = own.loss_gap
    if gap is not None and all(Overall(MODEL, [t]).loses_nothing for t in own.totals):
        words = "better than its sources" if gap <= 0 else "as well as its sources"
        nothing = (
            f"No repair is recommended: the model predicts this text {words} ({gap:+.3f} nats)."
        )
        return (nothing, *findings)
    return (*_ranked(measured, own), *findings)


def _ranked(measured: Measurements, own: Overall) -> list[str]:
    """Return each repair that the model has not had, with the share of the gap it should close."""
    bound = won_back(measured.swaps)
    calibration = expected_of_calibration(own.mean("kl"))
    if bound is not None:
        calibration = expected_by_swaps(bound)
    elif own.mismatch <= INTACT:
        calibration = Expected(0.0, 0.0, 0.0)
    by = "by swapped routers" if bound is not None else "by the routing KL"
    expected = {
        "refit --solver gradient": "",
        "distill": "",
        "refit": f"{REFIT} in merges of synthetic specialists; ",
        "calibrate": f"{calibration} {by}, in merges of synthetic specialists; ",
    }
    open_to = {name: text for name, text in expected.items() if name not in measured.repaired}
    ranks = [
        f"{place}. moemerge {name}: closes {text}{NATURAL[name]}."
        for place, (name, text) in enumerate(open_to.items(), start=1)
    ]
    best, *flags = next(iter(open_to)).split()
    command = " ".join(["moemerge", best, measured.command or "MODEL OUT", *flags])
    return [*ranks, f"To repair: {command}"]


def _mispaired(own: Overall) -> list[str]:
    """Name texts that their source predicts worse than the merge."""
    return [
        f"Source {t.domain!r} predicts its text worse than the merge ({t.loss_source:.2f} against "
        f"{t.loss:.2f}): are the names swapped?"
        for t in own.totals
        if t.loss is not None
        and t.loss_source is not None
        and t.loss_source > t.loss + 10 * NOTICEABLE
    ]


def _elsewhere(measured: Measurements) -> list[str]:
    """State what each model lost on domains without a source, and how to preserve it."""
    advice = []
    for domain in dict.fromkeys(total.domain for total in measured.elsewhere):
        totals = [total for total in measured.elsewhere if total.domain == domain]
        gaps = {t.model: gap for t in totals if (gap := Overall(t.model, [t]).loss_gap) is not None}
        if gaps:
            names = (f"{measured.names.get(name, name)} {gap:+.3f}" for name, gap in gaps.items())
            remedy = (
                "; the base as one more source of the repair keeps it: --source base=BASE --data "
                "base=FILE"
            )
            advice.append(
                f"On {domain}, which has no source, the loss above the base's is "
                f"{', '.join(names)} nats{remedy if max(gaps.values()) > NOTICEABLE else ''}."
            )
    return advice


def _experts(own: Sequence[LayerDiagnosis]) -> list[str]:
    """Describe the layer with the most experts that receive no tokens, or too many."""
    advice = []
    starved = max(own, key=lambda row: len(row.dead))
    if starved.dead:
        shown = ", ".join(map(str, starved.dead[:EXPERTS_NAMED]))
        more = len(starved.dead) - EXPERTS_NAMED
        advice.append(
            f"Layer {starved.layer} on {starved.domain}: almost no token reaches expert {shown}"
            f"{f' and {more} more' if more > 0 else ''}, though the source uses them."
        )
    crowded = max(own, key=lambda row: max((row.load[e] for e in row.overloaded), default=0.0))
    if crowded.overloaded:
        expert = max(crowded.overloaded, key=lambda e: crowded.load[e])
        advice.append(
            f"Layer {crowded.layer} on {crowded.domain}: expert {expert} takes "
            f"{percent(crowded.load[expert])} of the choices, with its source "
            f"{percent(crowded.load_source[expert])}."
        )
    thin = sorted({row.domain for row in own if row.tokens < FEW_CHOICES * len(row.load)})
    if thin:
        advice.append(
            f"Few tokens ({', '.join(thin)}): loads and single experts are rough; give more text."
        )
    return advice
