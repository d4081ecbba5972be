"""What the figures amount to: a sentence, three numbers, and which model to go on with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moemerge.diagnosis.results import MODEL, DomainTotal, KeyNumber, Verdict
from moemerge.report.words import percent, plain

# Mean mismatch up to which a verdict holds. Rounding to bfloat16 alone moves a few in a thousand
# choices; the paper calls a merge with half of them moved broken down.
INTACT: Final = 0.02
SLIGHT: Final = 0.10
DAMAGED: Final = 0.25
# Domains whose mismatch differs by less need no telling apart.
UNLIKE: Final = 0.02
# A loss is told from another at this many nats.
NOTICEABLE: Final = 0.01
# Share of tokens within Lemma 1's neighbourhood that its quadratic model should have, and the
# factor of the true KL within which it is good enough all the same.
LOCAL: Final = 0.5
ROUGH: Final = 1.25


@dataclass(frozen=True)
class Overall:
    """One model over all domains."""

    model: str
    totals: Sequence[DomainTotal]

    def mean(self, figure: str) -> float:
        return math.fsum(total.figures[figure] for total in self.totals) / len(self.totals)

    @property
    def mismatch(self) -> float:
        return self.mean("mismatch")

    @property
    def loss_gap(self) -> float | None:
        """How far the next-token loss lies above the sources', in nats; None where unknown."""
        pairs = [(total.loss, total.loss_source) for total in self.totals]
        gaps = [own - source for own, source in pairs if own is not None and source is not None]
        return math.fsum(gaps) / len(gaps) if gaps else None

    @property
    def routes_exactly(self) -> bool:
        return all(total.mismatch == 0 and total.kl == 0 for total in self.totals)


def overall(totals: Sequence[DomainTotal]) -> dict[str, Overall]:
    """Every model by its name, the diagnosed one first."""
    names = dict.fromkeys(total.model for total in totals)
    return {name: Overall(name, [t for t in totals if t.model == name]) for name in names}


def recommended(models: Mapping[str, Overall]) -> tuple[str, ...]:
    """The model with the least mismatch; where another predicts noticeably better, that as well.

    Of models with the same mismatch, to the digits that are shown, the one with the least loss;
    the diagnosed model where that is the same too.
    """
    routes_best = min(models.values(), key=lambda one: one.mismatch)
    shown = percent(routes_best.mismatch)
    alike = [one for one in models.values() if percent(one.mismatch) == shown]
    routes_best = _least_loss(alike)
    predicts_best = _least_loss(list(models.values()))
    gaps = routes_best.loss_gap, predicts_best.loss_gap
    if gaps[0] is None or gaps[1] is None or gaps[0] <= gaps[1] + NOTICEABLE:
        return (routes_best.model,)
    return (routes_best.model, predicts_best.model)


def _least_loss(models: Sequence[Overall]) -> Overall:
    """The first of those whose loss is noticeably the least."""
    least = min((one.loss_gap for one in models if one.loss_gap is not None), default=None)
    for one in models:
        if least is None or (one.loss_gap is not None and one.loss_gap <= least + NOTICEABLE):
            return one
    raise AssertionError("unreachable: some model has the least loss")


def judge(totals: Sequence[DomainTotal], names: Mapping[str, str] | None = None) -> Verdict:
    """The diagnosed model in words and three numbers, means over the domains.

    `names` are what models are called, where that is not their name in the totals.
    """
    models = overall(totals)
    own = models[MODEL]
    mismatch, touched, gap = own.mismatch, own.mean("any_mismatch"), own.loss_gap
    third = (
        KeyNumber("KL of the routing", own.mean("kl"), plain(own.mean("kl")))
        if gap is None
        else KeyNumber("next-token loss above the sources'", gap, f"{gap:+.3f} nats")
    )
    return Verdict(
        " ".join([_state(own), *_compared(models, names or {})]),
        (
            KeyNumber("expert choices that differ", mismatch, percent(mismatch)),
            KeyNumber("tokens with a changed choice in some layer", touched, percent(touched)),
            third,
        ),
        recommended(models),
        theory(own),
    )


def _state(own: Overall) -> str:
    if own.routes_exactly:
        return "The model routes exactly as its sources do."
    mismatch, worst = own.mismatch, max(own.totals, key=lambda total: total.mismatch)
    stands_out = worst.mismatch - mismatch > UNLIKE
    where = f", worst on {worst.domain} ({percent(worst.mismatch)})" if stands_out else ""
    share = f"{percent(mismatch)} of the sources' expert choices are not made{where}."
    if mismatch <= INTACT:
        return f"The routing is intact: {share}"
    if mismatch <= SLIGHT:
        return f"The routing has shifted a little: {share}"
    if mismatch <= DAMAGED:
        return f"The routing is damaged: {share}"
    return f"The routing has broken down: {share}"


def _compared(models: Mapping[str, Overall], names: Mapping[str, str]) -> list[str]:
    """How the best of the other models routes."""
    others = [one for name, one in models.items() if name != MODEL]
    if not others:
        return []
    best, own = min(others, key=lambda one: one.mismatch), models[MODEL]
    name, share = names.get(best.model, best.model), percent(best.mismatch)
    if share == percent(own.mismatch):
        return [f"{name} routes no better: {share}."]
    if best.mismatch < own.mismatch:
        return [f"{name} routes better: {share}."]
    return [
        f"The others route worse; the best of them is {name}: {share}."
        if len(others) > 1
        else f"{name} routes worse: {share}."
    ]


def theory(own: Overall) -> str:
    """Whether the quadratic model that calibration solves holds for these routers, in words."""
    near, kl = own.mean("shift_small"), own.mean("kl_on_features")
    if kl == 0:
        return "There is nothing to model: on the same features the routers agree exactly."
    ratio = own.mean("quadratic") / kl
    tokens = (
        f"{percent(near)} of the tokens are within Lemma 1's neighbourhood (logit shift below 0.1)"
    )
    model = f"the quadratic model gives {plain(ratio, 2)} times the true KL"
    if near >= LOCAL:
        return f"Yes: {tokens}, and {model}."
    if 1 / ROUGH <= ratio <= ROUGH:
        return f"Near enough: only {tokens}, but {model}."
    return f"No: only {tokens}, and {model}. --objective exact calibrates on the KL itself."
