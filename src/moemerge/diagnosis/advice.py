"""From figures to words: what to do next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moemerge.diagnosis.results import MODEL, DomainTotal, LayerDiagnosis, Swap
from moemerge.diagnosis.verdict import (
    INTACT,
    best_other,
    loss_gap,
    mean,
    percent,
    routes_exactly,
    totals_of,
)

# A run of layers is where the mismatch is, if it has most of it and is much worse than the rest.
MOST: Final = 0.5
WORSE: Final = 1.5
# Shares of the mismatch that remain when both routers see the same features.
ROUTERS_OWN: Final = 0.6
FEATURES_OWN: Final = 0.3
# Below this share of tokens within Lemma 1's neighbourhood, its quadratic model is rough.
LOCAL: Final = 0.5
# Choices for an even load of each expert below which loads are noise.
FEW_CHOICES: Final = 20
# A loss is told from another at this many nats.
NOTICEABLE: Final = 0.01
EXPERTS_NAMED: Final = 6
# The quadratic model is good enough within this factor of the true KL.
ROUGH: Final = 1.25


@dataclass(frozen=True)
class Measurements:
    """All that advice follows from."""

    rows: Sequence[LayerDiagnosis]
    totals: Sequence[DomainTotal]
    swaps: Sequence[Swap] = ()
    # Calibration reports by the names of the models that have one.
    calibrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # what models are called
    routed: Sequence[int] = ()  # every layer with a router, measured or not, ascending


class _Subject:
    """One model's part of the measurements: what advice is about."""

    def __init__(self, found: Measurements, model: str) -> None:
        self.rows = [row for row in found.rows if row.model == model]
        self.totals = totals_of(found.totals, model)
        calibration = found.calibrations.get(model, {})
        self.settings: Mapping[str, Any] = calibration.get("settings") or {}
        self.calibrated = {row.get("layer") for row in calibration.get("layers", ())}
        self.name = found.names.get(model, model)
        by_layer: dict[int, list[float]] = {}
        for row in self.rows:
            by_layer.setdefault(row.layer, []).append(row.mismatch)
        self.layers = {layer: mean(values) for layer, values in sorted(by_layer.items())}
        self.routed = list(found.routed or self.layers)

    @property
    def mismatch(self) -> float:
        return mean([total.mismatch for total in self.totals])


def advise(found: Measurements) -> tuple[str, ...]:
    """What follows from the figures, the most important first.

    It is about the diagnosed model, or about one beside it that does better: nobody should go on
    with the worse one.
    """
    subject = _Subject(found, MODEL)
    if routes_exactly(subject.totals):
        return ("Nothing to repair: no token is routed otherwise than by its source.",)
    words, better = _compared(found, subject)
    about = subject if better is None else better
    said = []
    if about.mismatch > INTACT:
        said += _cause(about)
        said += _where(about)
    else:
        said.append("Little to repair: calibrating the routers cannot gain much here.")
    said += _experts(about.rows)
    said += _locality(about.totals)
    if better is not None:
        said = [f"There, {text[0].lower()}{text[1:]}" for text in said]
    return (*words, *said, *_swapped(found.swaps), *_few_tokens(subject.rows))


def _compared(found: Measurements, own: _Subject) -> tuple[list[str], _Subject | None]:
    """What to say of the best model beside the diagnosed one, and it, where one should go on."""
    best = best_other(found.totals)
    if best is None:
        return [], None
    other = _Subject(found, best)
    shares = percent(other.mismatch), percent(own.mismatch)
    if other.mismatch >= own.mismatch or shares[0] == shares[1]:
        return [], None
    numbers = f"{shares[0]} mismatch instead of {shares[1]}"
    gaps = loss_gap(other.totals), loss_gap(own.totals)
    if gaps[0] is None or gaps[1] is None:
        return [f"Go on with {other.name}: {numbers}."], other
    losses = f"{gaps[0]:+.3f} nats instead of {gaps[1]:+.3f}"
    if gaps[0] > gaps[1] + NOTICEABLE:
        return [
            f"{other.name} keeps more of the routing ({numbers}), but predicts worse (loss above "
            f"the sources' {losses}): routing alone does not make it the better model."
        ], None
    return [f"Go on with {other.name}: {numbers}, loss above the sources' {losses}."], other


def _cause(about: _Subject) -> list[str]:
    """Routers or features: what remains of the mismatch on the same features is the routers'."""
    same = mean([total.mismatch_on_features for total in about.totals])
    drift = mean([total.drift for total in about.totals])
    numbers = (
        f"{percent(same)} mismatch on the same features, {percent(about.mismatch)} on their own"
    )
    if same >= ROUTERS_OWN * about.mismatch:
        if about.calibrated.issuperset(about.layers):
            return [f"The routers themselves still disagree ({numbers})."]
        return [f"The routers themselves disagree ({numbers}): calibrating them helps."]
    words = f"the features drifted by {percent(drift)}"
    if same <= FEATURES_OWN * about.mismatch:
        start = f"The routers agree on the same features, but {words} ({numbers}): "
        if about.settings.get("targets") == "source-features":
            return [start + "the weights are at fault, not the routers; try another merge method."]
        return [
            start + "the weights are at fault more than the routers; calibrate with "
            "--targets source-features, or try another merge method."
        ]
    return [f"Routers and features share the blame ({numbers}; {words})."]


def _where(about: _Subject) -> list[str]:
    numbers = list(about.layers)
    run = concentrated(list(about.layers.values()))
    if run is not None:
        chosen = numbers[run[0] : run[1] + 1]
        noun, verb = ("layer", "is") if len(chosen) == 1 else ("layers", "are")
        start = f"The mismatch is concentrated in {noun} {_span(chosen, about.routed)}"
        if about.calibrated.issuperset(chosen):
            return [f"{start}, which {verb} calibrated already."]
        return [f"{start}: calibrate with --layers {_flag(chosen, about.routed)}."]
    if about.calibrated.issuperset(numbers):
        return [f"The routers are calibrated already; {_other_calibration(about.settings)}."]
    if numbers == about.routed:
        return ["The mismatch is spread over the layers: calibrate all of them (--layers all)."]
    return [
        "The mismatch is spread over the layers measured: calibrate them all "
        f"(--layers {_flag(numbers, about.routed)})."
    ]


def _span(chosen: Sequence[int], routed: Sequence[int]) -> str:
    """`8-15`, which may pass over layers without a router; `3,9` where routers lie between."""
    if len(chosen) == 1:
        return str(chosen[0])
    between = [layer for layer in routed if chosen[0] <= layer <= chosen[-1]]
    return f"{chosen[0]}-{chosen[-1]}" if between == [*chosen] else ",".join(map(str, chosen))


def _flag(chosen: Sequence[int], routed: Sequence[int]) -> str:
    """The value of --layers that means just these."""
    at_the_end = [*routed[-len(chosen) :]] == [*chosen]
    return f"last:{len(chosen)}" if at_the_end else _span(chosen, routed)


def _other_calibration(settings: Mapping[str, Any]) -> str:
    """What a calibration with these settings has not tried."""
    left = ["more or other calibration text"]
    for name, value in (("targets", "source-features"), ("objective", "exact")):
        if settings.get(name) != value:
            left.append(f"--{name} {value}")
    *most, last = left
    return f"{', '.join(most)}{' or ' if most else ''}{last} may still help"


def concentrated(values: Sequence[float]) -> tuple[int, int] | None:
    """First and last place of the run that stands out most, if it has most of the sum.

    The run is the one of at most half of the places whose mean lies farthest above that of the
    rest, in variance explained: n m (mean − rest)². None where it is not much worse than the rest.
    """
    total, count = math.fsum(values), len(values)
    best, explained = None, 0.0
    for length in range(1, count // 2 + 1):
        for at in range(count - length + 1):
            inside = math.fsum(values[at : at + length])
            mean, rest = inside / length, (total - inside) / (count - length)
            variance = length * (count - length) * (mean - rest) ** 2
            if mean >= WORSE * rest and inside >= MOST * total and variance > explained:
                best, explained = (at, at + length - 1), variance
    return best


def _swapped(swaps: Sequence[Swap]) -> list[str]:
    """How much of the damage the routers alone undo (the paper's Figure 1)."""
    found = []
    for domain in dict.fromkeys(swap.domain for swap in swaps):
        of = {(s.weights_of, s.routers_of): s.loss for s in swaps if s.domain == domain}
        merged, repaired, source = (
            of.get((MODEL, MODEL)),
            of.get((MODEL, domain)),
            of.get((domain, domain)),
        )
        if merged is None or repaired is None or source is None:
            continue
        if merged - source < NOTICEABLE:
            continue
        share = (merged - repaired) / (merged - source)
        if share > 0:
            found.append(
                f"With the routers of {domain} the merged weights win back {percent(min(share, 1))}"
                f" of what the merge lost there ({merged - source:.3f} nats)."
            )
        else:
            found.append(
                f"The routers of {domain} do not help the merged weights there: its loss "
                f"({merged - source:.3f} nats) is not a matter of routing alone."
            )
    return found


def _experts(own: Sequence[LayerDiagnosis]) -> list[str]:
    """The layer with most experts that receive nothing, or too much."""
    found = []
    starved = max(own, key=lambda row: len(row.dead))
    if starved.dead:
        more = sum(bool(row.dead) for row in own) - 1
        others = f" (and in {more} more of the table's rows)" if more else ""
        found.append(
            f"Layer {starved.layer} on {starved.domain}: {_listed(starved.dead)} "
            f"hardly any token, though the source uses them{others}."
        )
    crowded = max(own, key=lambda row: max((row.load[e] for e in row.overloaded), default=0.0))
    if crowded.overloaded:
        expert = max(crowded.overloaded, key=lambda e: crowded.load[e])
        found.append(
            f"Layer {crowded.layer} on {crowded.domain}: expert {expert} takes "
            f"{percent(crowded.load[expert])} of the choices, with its source "
            f"{percent(crowded.load_source[expert])}."
        )
    return found


def _listed(experts: Sequence[int]) -> str:
    if len(experts) == 1:
        return f"expert {experts[0]} receives"
    shown = ", ".join(map(str, experts[:EXPERTS_NAMED]))
    more = f" and {len(experts) - EXPERTS_NAMED} more" if len(experts) > EXPERTS_NAMED else ""
    return f"experts {shown}{more} receive"


def _locality(mine: Sequence[DomainTotal]) -> list[str]:
    near = mean([total.shift_small for total in mine])
    kl = mean([total.kl_on_features for total in mine])
    if near >= LOCAL or kl == 0:
        return []
    ratio = mean([total.quadratic for total in mine]) / kl
    if 1 / ROUGH <= ratio <= ROUGH:
        return []
    return [
        f"Only {percent(near)} of the tokens are within Lemma 1's neighbourhood (logit shift below "
        f"0.1; the quadratic model gives {ratio:.2g} times the true KL): --objective exact "
        "calibrates on the KL itself."
    ]


def _few_tokens(own: Sequence[LayerDiagnosis]) -> list[str]:
    thin = sorted({r.domain for r in own if r.tokens < FEW_CHOICES * len(r.load)})
    if not thin:
        return []
    return [f"Few tokens ({', '.join(thin)}): loads and single experts are rough; give more text."]
