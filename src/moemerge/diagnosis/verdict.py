"""Judge a model by its figures: a verdict and a recommended model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moemerge.diagnosis.results import MODEL, DomainTotal, KeyNumber, Swap, Verdict
from moemerge.runtime.formatting import percent, plain

# Mean mismatch up to which a verdict holds. Rounding to bfloat16 alone changes a few in a thousand
# choices. The paper calls a merge with half of them changed broken down.
INTACT: Final = 0.02
SLIGHT: Final = 0.10
DAMAGED: Final = 0.25
# Domains whose mismatch differs by less are reported as equal.
UNLIKE: Final = 0.02
# Losses that differ by less, in nats, count as equal.
NOTICEABLE: Final = 0.01
# Share of tokens within Lemma 1's neighbourhood above which its quadratic model holds, and the
# factor of the true KL within which it is still good enough.
LOCAL: Final = 0.5
ROUGH: Final = 1.25
# The share of the lost loss that the sources' routers must win back for routers to be the problem.
# In measured merges they won back 63 to 94 %, or at most 15 % and calibration closed nothing
# (`evidence/swaps.py`).
WORTH: Final = 0.25


@dataclass(frozen=True)
class Overall:
    """The totals of one model over all domains."""

    model: str
    totals: Sequence[DomainTotal]

    def mean(self, figure: str) -> float:
        return math.fsum(total.figures[figure] for total in self.totals) / len(self.totals)

    @property
    def mismatch(self) -> float:
        return self.mean("mismatch")

    @property
    def loss_gap(self) -> float | None:
        """The next-token loss minus the sources', in nats; None if unknown."""
        pairs = [(total.loss, total.loss_source) for total in self.totals]
        gaps = [own - source for own, source in pairs if own is not None and source is not None]
        return math.fsum(gaps) / len(gaps) if gaps else None

    @property
    def loses_nothing(self) -> bool:
        """Whether it predicts the text as well as its sources."""
        gap = self.loss_gap
        return gap is not None and gap < NOTICEABLE

    @property
    def routes_exactly(self) -> bool:
        return all(total.mismatch == 0 and total.kl == 0 for total in self.totals)


def overall_totals(totals: Sequence[DomainTotal]) -> dict[str, Overall]:
    """Return the totals of every model by name, the diagnosed one first."""
    names = dict.fromkeys(total.model for total in totals)
    return {name: Overall(name, [t for t in totals if t.model == name]) for name in names}


def won_back(swaps: Sequence[Swap]) -> float | None:
    """Return the share of the lost loss that the sources' routers win back in the merged weights.

    It is a forecast of what calibration gains; distilled routers may win back more. None if it was
    not measured, or if the merge lost nothing noticeable.
    """
    found = [(gain, loss) for _, gain, loss in gains_by_swaps(swaps)]
    if not found:
        return None
    gains, losses = zip(*found, strict=True)
    return max(0.0, math.fsum(gains) / math.fsum(losses))


def gains_by_swaps(swaps: Sequence[Swap]) -> Iterator[tuple[str, float, float]]:
    """Yield each domain where the merge lost something noticeable, what its source's routers win
    back there, and what was lost.
    """
    for domain in dict.fromkeys(swap.domain for swap in swaps):
        found = {(s.weights_of, s.routers_of): s.loss for s in swaps if s.domain == domain}
        pairs = ((MODEL, MODEL), (MODEL, domain), (domain, domain))
        merged, repaired, source = (found.get(pair) for pair in pairs)
        if merged is None or repaired is None or source is None or merged - source < NOTICEABLE:
            continue
        yield domain, merged - repaired, merged - source


def recommended(models: Mapping[str, Overall]) -> tuple[str, ...]:
    """Return the model with the least loss; among equals that with the least mismatch.

    Without losses the mismatch decides. The diagnosed model is first among equals.
    """
    gaps = {name: one.loss_gap for name, one in models.items()}
    least = min((gap for gap in gaps.values() if gap is not None), default=None)
    alike = [
        name
        for name, gap in gaps.items()
        if least is None or (gap is not None and gap <= least + NOTICEABLE)
    ]
    # Rounded as it is displayed, so that equal texts are equal.
    return (min(alike, key=lambda name: round(models[name].mismatch, 3)),)


def verdict_of(
    totals: Sequence[DomainTotal],
    names: Mapping[str, str] | None = None,
    swaps: Sequence[Swap] = (),
) -> Verdict:
    """Return the verdict on the diagnosed model: a sentence and three numbers, averaged over
    domains.

    `names` are the display names of models, if they differ from those in the totals.
    """
    models = overall_totals(totals)
    own, best = models[MODEL], recommended(models)
    mismatch, touched, gap = own.mismatch, own.mean("any_mismatch"), own.loss_gap
    third = (
        KeyNumber("KL of the routing", own.mean("kl"), plain(own.mean("kl")))
        if gap is None
        else KeyNumber("next-token loss above the sources'", gap, f"{gap:+.3f} nats")
    )
    return Verdict(
        " ".join([_state(own), *_bound(swaps), *_compared(models, best, names or {})]),
        (
            KeyNumber("expert choices that differ", mismatch, percent(mismatch)),
            KeyNumber("tokens with a changed choice in some layer", touched, percent(touched)),
            third,
        ),
        best,
        theory(own),
    )


def _state(own: Overall) -> str:
    if own.routes_exactly:
        return "The model routes exactly as its sources do."
    mismatch, worst = own.mismatch, max(own.totals, key=lambda total: total.mismatch)
    stands_out = worst.mismatch - mismatch > UNLIKE
    where = f", worst on {worst.domain} ({percent(worst.mismatch)})" if stands_out else ""
    share = f"{percent(mismatch)} of the sources' expert choices are not made{where}."
    states = {INTACT: "is intact", SLIGHT: "has shifted a little", DAMAGED: "is damaged"}
    words = (words for most, words in states.items() if mismatch <= most)
    return f"The routing {next(words, 'has broken down')}: {share}"


def _bound(swaps: Sequence[Swap]) -> list[str]:
    """State what the routers cost, if swaps were measured: the strongest evidence about them."""
    bound = won_back(swaps)
    if bound is None:
        return []
    share = f"the sources' own routers win back {percent(min(bound, 1))} of the lost loss"
    if bound < WORTH:
        return [f"The routers are not the problem: {share}."]
    return [f"The routers cost loss: {share}."]


def _compared(
    models: Mapping[str, Overall], best: Sequence[str], names: Mapping[str, str]
) -> list[str]:
    """Name the recommended model, if it is another one, with both figures."""
    if best[0] == MODEL:
        return []
    one, own = models[best[0]], models[MODEL]
    losses = ""
    if one.loss_gap is not None and own.loss_gap is not None:
        losses = (
            f", loss above the sources' {one.loss_gap:+.3f} instead of {own.loss_gap:+.3f} nats"
        )
    return [
        f"{names.get(one.model, one.model)} is better: {percent(one.mismatch)} mismatch{losses}."
    ]


def theory(own: Overall) -> str:
    """State whether the quadratic model that calibration solves holds for these routers."""
    near, kl = own.mean("shift_small"), own.mean("kl_on_features")
    if kl == 0:
        return "There is nothing to model: on the same features the routers agree exactly."
    ratio = own.mean("quadratic") / kl
    tokens = (
        f"{percent(near)} of the tokens are within Lemma 1's neighbourhood (logit shift below 0.1)"
    )
    model = f"the quadratic model yields {plain(ratio, 2)} times the true KL"
    if near >= LOCAL:
        return f"Yes: {tokens}, and {model}."
    if 1 / ROUGH <= ratio <= ROUGH:
        return f"Near enough: {model}, although only {tokens}."
    return f"No: only {tokens}, and {model}. --objective exact calibrates on the KL itself."
