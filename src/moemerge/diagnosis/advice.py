"""Derive advice from the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from moemerge.diagnosis.results import MODEL, DomainTotal, LayerDiagnosis, Swap
from moemerge.diagnosis.verdict import (
    INTACT,
    NOTICEABLE,
    Overall,
    gains_by_swaps,
    overall_totals,
    recommended,
    routers_matter,
    theory,
    won_back,
)
from moemerge.runtime.formatting import percent, plain

# The mismatch is concentrated in a run of layers if they have most of it and are much worse than
# the rest.
MOST: Final = 0.5
WORSE: Final = 1.5
# Shares of the mismatch that remain if both routers see the same features.
ROUTERS_OWN: Final = 0.6
FEATURES_OWN: Final = 0.3
# Choices per expert, at an even load, below which loads are noise.
FEW_CHOICES: Final = 20
EXPERTS_NAMED: Final = 6


@dataclass(frozen=True)
class Measurements:
    """All measurements that the advice is based on."""

    rows: Sequence[LayerDiagnosis]
    totals: Sequence[DomainTotal]
    swaps: Sequence[Swap] = ()
    # Calibration reports by the names of the models that have one.
    calibrations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # likewise
    names: Mapping[str, str] = field(default_factory=dict)  # display names of models
    routed: Sequence[int] = ()  # all layers with a router, measured or not, ascending
    elsewhere: Sequence[DomainTotal] = ()  # on text of domains without a source, against the base


class _Subject:
    """The measurements of the model that the advice is about."""

    def __init__(self, measured: Measurements, overall: Overall) -> None:
        self.overall = overall
        self.rows = [row for row in measured.rows if row.model == overall.model]
        calibration = measured.calibrations.get(overall.model, {})
        self.settings: Mapping[str, Any] = calibration.get("settings") or {}
        self.calibrated = {row.get("layer") for row in calibration.get("layers", ())}
        refit = measured.refits.get(overall.model)
        self.refitted = refit is not None
        self.solver = ((refit or {}).get("settings") or {}).get("solver")
        by_layer: dict[int, list[float]] = {}
        for row in self.rows:
            by_layer.setdefault(row.layer, []).append(row.mismatch)
        self.layers = {n: math.fsum(v) / len(v) for n, v in sorted(by_layer.items())}
        self.routed = list(measured.routed or self.layers)


def advise(measured: Measurements) -> tuple[str, ...]:
    """Return the recommended repair, or that there is none, then its evidence and other findings.

    The advice is about the recommended model. If two are recommended and the diagnosed model is one
    of them, it is about that one.
    """
    models = overall_totals(measured.totals)
    elsewhere = _elsewhere(measured)
    if models[MODEL].routes_exactly:
        return (
            "Nothing to repair: no token is routed otherwise than by its source.",
            *elsewhere,
        )
    best = recommended(models, measured.swaps)
    about = _Subject(measured, models[MODEL if MODEL in best else best[0]])

    def named(advice: Sequence[str]) -> list[str]:
        if MODEL in best:
            return [*advice]
        name = measured.names.get(best[0], best[0])
        return [f"{name}: {text[0].lower()}{text[1:]}" for text in advice]

    calibrate = _calibration_helps(about.overall, measured.swaps)
    if about.overall.mismatch <= INTACT:
        calibrate = False
        repair = ["Little to repair: calibrating the routers cannot gain much here."]
    elif _loses_nothing(about.overall):
        calibrate = False
        repair = [_no_loss(about.overall)]
    elif calibrate:
        repair = [_calibrate(about), *_cause(about), *_where(about)]
        repair += _expected(about, measured.swaps)
    elif not routers_matter(measured.swaps):
        repair = [f"{_refit(about)} Do not calibrate: the weights cost the loss, not the routers."]
        repair += [] if about.refitted else [NATURAL_TEXT]
    else:
        repair = [_refit(about), *_cause(about, calibrate=False)]
        repair += _where(about, calibrate=False)
        repair += _expected(about, measured.swaps)
    others = _experts(about.rows)
    if calibrate:
        others += _locality(about.overall)
    own = [row for row in measured.rows if row.model == MODEL]
    choice = _choice([models[name] for name in best], models[MODEL], measured.names)
    return (
        *choice,
        *named(repair),
        *elsewhere,
        *named(others),
        *_swapped(measured.swaps),
        *_few_tokens(own),
    )


def _calibration_helps(own: Overall, swaps: Sequence[Swap]) -> bool:
    """Return whether calibration closed some of the gap in measured merges like this one."""
    if won_back(swaps) is not None:
        return routers_matter(swaps)
    return expected_of_calibration(own.mean("kl")).low > 0


def _loses_nothing(own: Overall) -> bool:
    """Return whether the model predicts the text of every domain as well as its source does."""
    gaps = [Overall(own.model, [total]).loss_gap for total in own.totals]
    return all(gap is not None and gap < NOTICEABLE for gap in gaps)


def _no_loss(own: Overall) -> str:
    gap = own.loss_gap
    assert gap is not None  # `_loses_nothing`
    words = "better than its sources" if gap <= 0 else "as well as its sources"
    return (
        f"No repair is recommended: the model predicts this text {words} ({gap:+.3f} nats), so the "
        "mismatch may cost nothing. Check it on text that the sources predict well."
    )


def _calibrate(about: _Subject) -> str:
    if about.calibrated.issuperset(about.layers):
        return f"The routers are calibrated already; {_other_calibration(about.settings)}."
    return "Calibrate the routers (moemerge calibrate)."


def _refit(about: _Subject) -> str:
    """Recommend to change the weights, by a repair that the model has not had."""
    if not about.refitted:
        return "Refit the weights (moemerge refit --solver gradient)."
    if about.solver == "gradient":
        return (
            "The weights are refitted already; more text or moemerge distill from the sources may "
            "still help."
        )
    return (
        "The weights are refitted already; moemerge refit --solver gradient or moemerge distill "
        "from the sources may still help."
    )


# Of the gap of the sources' plain average, whichever merge was refitted (`evidence/prediction.py`).
REFIT_LEAVES: Final = 0.57
NATURAL_TEXT: Final = (
    "On natural text, moemerge refit --solver gradient closed 52 to 101 % of the gap to the "
    "sources, and moemerge distill 27 to 97 %. Refit in closed form left the same gap after every "
    f"merge: about {100 * REFIT_LEAVES:.0f} % of that of the sources' plain average "
    "(merge_method: linear), a third if fine-tuning was short."
)


def _expected(about: _Subject, swaps: Sequence[Swap]) -> list[str]:
    """State what repairs closed in measured merges that were not repaired yet."""
    bound = won_back(swaps)
    if bound is not None:
        if about.calibrated:
            return []
        return [
            "In merges of synthetic specialists where the sources' routers won back 63 to 94 %, "
            f"calibration closed about 9 points less: here, {expected_by_swaps(bound)} of the gap."
        ]
    unmeasured = (
        "Whether the mismatch costs loss is not measured: --swaps bounds what any repair of "
        "routers can gain."
    )
    if about.calibrated or about.refitted:
        return [unmeasured]
    kl = about.overall.mean("kl")
    return [
        f"In merges of synthetic specialists with such a routing KL ({plain(kl)}), calibration "
        f"closed {expected_of_calibration(kl)} of the gap to the sources and refit {REFIT}; on "
        "natural text, calibration closed at most 14 %.",
        unmeasured,
    ]


def _choice(best: Sequence[Overall], own: Overall, names: Mapping[str, str]) -> list[str]:
    """State which model to use, by routing and by loss."""
    first = best[0]
    shares = f"{percent(first.mismatch)} mismatch"
    if first.model != MODEL:
        shares += f" instead of {percent(own.mismatch)}"
    called = [names.get(one.model, one.model) for one in best]
    if len(best) == 1:
        if first.model == MODEL:
            return []
        losses = ""
        if first.loss_gap is not None and own.loss_gap is not None:
            losses = (
                f", loss above the sources' {first.loss_gap:+.3f} nats instead of "
                f"{own.loss_gap:+.3f}"
            )
        return [f"Use {called[0]}: {shares}{losses}."]
    return [
        f"{called[0]} routes best ({shares}), {called[1]} predicts the text best (loss above the "
        f"sources' {best[1].loss_gap:+.3f} nats; {called[0]} {first.loss_gap:+.3f}). Neither "
        "number decides: try both on your tasks."
    ]


def _elsewhere(measured: Measurements) -> list[str]:
    """State what each model lost on domains without a source, and how to preserve it."""
    advice = []
    for domain in dict.fromkeys(total.domain for total in measured.elsewhere):
        totals = [total for total in measured.elsewhere if total.domain == domain]
        gaps = {t.model: gap for t in totals if (gap := Overall(t.model, [t]).loss_gap) is not None}
        if not gaps:
            continue
        names = ", ".join(
            f"{measured.names.get(name, name)} {gap:+.3f}" for name, gap in gaps.items()
        )
        start = (
            f"On {domain}, which no source speaks for, the loss above the base's is {names} nats"
        )
        remedy = (
            "; the base as one more source of the repair keeps it: --source base=BASE --data "
            "base=FILE"
        )
        advice.append(start + (remedy if max(gaps.values()) > NOTICEABLE else "") + ".")
    return advice


def _cause(about: _Subject, *, calibrate: bool = True) -> list[str]:
    """State whether routers or features cause the mismatch: what remains on equal features is due
    to the routers.
    """
    mismatch = about.overall.mismatch
    same, drift = (about.overall.mean(name) for name in ("mismatch_on_features", "drift"))
    numbers = f"{percent(same)} mismatch on the same features, {percent(mismatch)} on their own"
    if same >= ROUTERS_OWN * mismatch:
        still = "still " if about.calibrated.issuperset(about.layers) else ""
        return [f"The routers themselves {still}disagree ({numbers})."]
    words = f"the features drifted by {percent(drift)}"
    if same > FEATURES_OWN * mismatch:
        return [f"Routers and features share the blame ({numbers}; {words})."]
    start = f"The routers agree on the same features, but {words} ({numbers})"
    if calibrate and about.settings.get("targets") != "source-features":
        return [f"{start}: calibrate with --targets source-features."]
    return [f"{start}: the weights are at fault more than the routers."]


def _where(about: _Subject, *, calibrate: bool = True) -> list[str]:
    """State where the mismatch is if it is concentrated, or which layers to calibrate."""
    numbers = list(about.layers)
    run = concentrated(list(about.layers.values()))
    if run is not None:
        chosen = numbers[run[0] : run[1] + 1]
        noun, verb = ("layer", "is") if len(chosen) == 1 else ("layers", "are")
        start = f"The mismatch is concentrated in {noun} {_span(chosen, about.routed)}"
        if about.calibrated.issuperset(chosen):
            return [f"{start}, which {verb} calibrated already."]
        if not calibrate:
            return [f"{start}."]
        return [f"{start}: calibrate with --layers {_flag(chosen, about.routed)}."]
    if not calibrate or numbers == about.routed or about.calibrated.issuperset(numbers):
        return []
    return [
        "The mismatch is spread over the layers measured: calibrate them all "
        f"(--layers {_flag(numbers, about.routed)})."
    ]


def _span(chosen: Sequence[int], routed: Sequence[int]) -> str:
    """Format a range of layers: `8-15` may skip layers without a router; `3,9` if there are routers
    between.
    """
    if len(chosen) == 1:
        return str(chosen[0])
    between = [layer for layer in routed if chosen[0] <= layer <= chosen[-1]]
    return f"{chosen[0]}-{chosen[-1]}" if between == [*chosen] else ",".join(map(str, chosen))


def _flag(chosen: Sequence[int], routed: Sequence[int]) -> str:
    """Return the value of --layers that selects exactly these."""
    at_the_end = [*routed[-len(chosen) :]] == [*chosen]
    return f"last:{len(chosen)}" if at_the_end else _span(chosen, routed)


def _other_calibration(settings: Mapping[str, Any]) -> str:
    """Name the settings that this calibration has not tried."""
    left = ["more or other calibration text"]
    for name, value in (("targets", "source-features"), ("objective", "exact")):
        if settings.get(name) != value:
            left.append(f"--{name} {value}")
    *most, last = left
    return f"{', '.join(most)}{' or ' if most else ''}{last} may still help"


def concentrated(values: Sequence[float]) -> tuple[int, int] | None:
    """Return the first and last index of the run that stands out most, if it has most of the sum.

    The run covers at most half of the indices. It maximises the explained variance n m (mean −
    rest)². None if it is not much worse than the rest.
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
    """State how much of the damage the routers alone undo (the paper's Figure 1)."""
    return [
        f"With the routers of {domain} the merged weights win back {percent(min(gain / lost, 1))}"
        f" of what the merge lost there ({lost:.3f} nats)."
        if gain > 0
        else f"The routers of {domain} do not help the merged weights there: its loss "
        f"({lost:.3f} nats) is not a matter of routing alone."
        for domain, gain, lost in gains_by_swaps(swaps)
    ]


def _experts(own: Sequence[LayerDiagnosis]) -> list[str]:
    """Describe the layer with the most experts that receive no tokens, or too many."""
    advice = []
    starved = max(own, key=lambda row: len(row.dead))
    if starved.dead:
        more = sum(bool(row.dead) for row in own) - 1
        others = f" (and in {more} more of the table's rows)" if more else ""
        advice.append(
            f"Layer {starved.layer} on {starved.domain}: {_listed(starved.dead)} "
            f"hardly any token, though the source uses them{others}."
        )
    crowded = max(own, key=lambda row: max((row.load[e] for e in row.overloaded), default=0.0))
    if crowded.overloaded:
        expert = max(crowded.overloaded, key=lambda e: crowded.load[e])
        advice.append(
            f"Layer {crowded.layer} on {crowded.domain}: expert {expert} takes "
            f"{percent(crowded.load[expert])} of the choices, with its source "
            f"{percent(crowded.load_source[expert])}."
        )
    return advice


def _listed(experts: Sequence[int]) -> str:
    if len(experts) == 1:
        return f"expert {experts[0]} receives"
    shown = ", ".join(map(str, experts[:EXPERTS_NAMED]))
    more = f" and {len(experts) - EXPERTS_NAMED} more" if len(experts) > EXPERTS_NAMED else ""
    return f"experts {shown}{more} receive"


def _locality(own: Overall) -> list[str]:
    verdict, _, words = theory(own).partition(": ")
    return [words[0].upper() + words[1:]] if verdict == "No" else []


def _few_tokens(own: Sequence[LayerDiagnosis]) -> list[str]:
    thin = sorted({r.domain for r in own if r.tokens < FEW_CHOICES * len(r.load)})
    if not thin:
        return []
    return [f"Few tokens ({', '.join(thin)}): loads and single experts are rough; give more text."]


@dataclass(frozen=True)
class Expected:
    """The share of the gap to the sources that a repair closed.

    It is the mean over merges of synthetic specialists, with the range of four fifths of them.
    Swapped routers predict what calibration closes, the KL of the routing does so less well.
    `evidence/prediction.py` and `evidence/swaps.py` fit the numbers and test them on other models.
    """

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.0%} ({self.low:.0%} to {self.high:.0%})"


# By the routing KL below which a band lies.
CALIBRATION: Final = {
    0.15: Expected(0.04, -0.02, 0.11),
    0.3: Expected(0.15, -0.05, 0.52),
    0.5: Expected(0.26, -0.06, 0.63),
    math.inf: Expected(0.55, 0.39, 0.78),
}
REFIT: Final = Expected(0.77, 0.60, 0.90)  # in closed form


def expected_of_calibration(kl: float) -> Expected:
    """Return what `calibrate` closed in merges with such a routing KL, which may be infinite."""
    bands = (expected for below, expected in CALIBRATION.items() if kl < below)
    return next(bands, CALIBRATION[math.inf])


# By how much less calibration closed than the sources' routers won back (`evidence/swaps.py`).
SHORTFALL: Final = Expected(0.09, 0.04, 0.19)


def expected_by_swaps(won_back: float) -> Expected:
    """Return what `calibrate` closed in merges where swapped routers won back this share."""
    shares = (SHORTFALL.share, SHORTFALL.high, SHORTFALL.low)
    return Expected(*(min(won_back, 1.0) - share for share in shares))
