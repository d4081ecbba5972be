"""Which number predicts what a repair closes: the KL of the routing, or the gap of the average?

The bands of `moemerge.diagnosis.advice` are fitted to the recorded merges of some seeds, and
tested on those of the others. What refit leaves is fitted on OLMoE models that were trained on
natural text, and tested on Qwen3-MoE.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.methods import EVERY
from evidence.tables import MERGES, REGIMES, VARIANTS, Cell, read_cells
from moemerge.diagnosis.advice import CALIBRATION, Expected

FITTED_SEEDS, TESTED_SEEDS = (0, 1, 2), (3, 4)
LEAST_GAP = 0.03  # of accuracy: the share of a smaller gap is noise


@dataclass(frozen=True)
class Merge:
    """One merge of one seed: its routing KL, and the share of the gap that each repair closes."""

    regime: str
    seed: int
    kl: float
    harc: float
    refit: float


def merges(path: Path) -> list[Merge]:
    """Return all merges whose repairs were recorded."""
    found = []
    for regime in REGIMES:
        for seed, cells in read_cells(path, regime).items():
            for form in MERGES.values():
                own = f"specialists{form.format('')}"
                for name in EVERY:
                    names = [text.format(form.format(name)) for text in VARIANTS]
                    if own in cells and all(one in cells for one in names):
                        merged, *repaired = (cells[one] for one in names)
                        gap = _mean(cells[own], "accuracy") - _mean(merged, "accuracy")
                        if gap < LEAST_GAP:
                            continue
                        before = _mean(merged, "accuracy")
                        shares = [(_mean(one, "accuracy") - before) / gap for one in repaired]
                        found.append(Merge(regime, seed, _mean(merged, "kl"), *shares))
    return found


def _mean(cell: Cell, figure: str) -> float:
    return statistics.fmean(domain[figure] for domain in cell["domains"].values())


def bands(found: Sequence[Merge]) -> dict[float, list[Merge]]:
    """Return the merges of every band of KL."""
    edges = [0.0, *CALIBRATION]
    return {
        below: [one for one in found if least <= one.kl < below]
        for least, below in zip(edges, CALIBRATION, strict=False)
    }


def expected(shares: Sequence[float]) -> Expected:
    """Return the mean and the range of four fifths."""
    tenths = statistics.quantiles(shares, n=10, method="inclusive")
    return Expected(statistics.fmean(shares), tenths[0], tenths[-1])


@dataclass(frozen=True)
class Tested:
    """How a prediction fares on models that it was not fitted to."""

    correlation: float
    error: float  # mean absolute
    naive_error: float  # of the fitted merges' mean
    inside: float  # share within the range


def tested(found: Sequence[Merge], share: Callable[[Merge], float]) -> Tested:
    fitted = [one for one in found if one.seed in FITTED_SEEDS]
    others = [one for one in found if one.seed in TESTED_SEEDS]
    by_band = {below: expected([*map(share, own)]) for below, own in bands(fitted).items()}
    pairs = [(by_band[below], share(one)) for below, own in bands(others).items() for one in own]
    mean = statistics.fmean(map(share, fitted))
    return Tested(
        statistics.correlation([e.share for e, _ in pairs], [y for _, y in pairs]),
        statistics.fmean(abs(e.share - y) for e, y in pairs),
        statistics.fmean(abs(mean - y) for _, y in pairs),
        statistics.fmean(e.low <= y <= e.high for e, y in pairs),
    )


# --- the figure -----------------------------------------------------------------------------------

COLOURS = {"plain": "#0072b2", "soft": "#d55e00"}
TITLES = {"harc": "HARC", "refit": "refit, closed form"}
WIDTH, PANEL, GAP, HEIGHT, LEFT, TOP = 960, 420, 56, 260, 48, 64
KLS, SHARES = (0.014, 1.5), (-0.5, 1.0)  # the ranges shown


@dataclass(frozen=True)
class Point:
    """A merge of natural-text models: its KL, and what a repair of this name closes."""

    repair: str
    kl: float
    share: float


def figure(found: Sequence[Merge], natural: Sequence[Point]) -> str:
    """Return an SVG of what HARC and refit close, against the KL of the routing."""
    body = "\n".join(_shapes(found, natural))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 52}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{TOP + HEIGHT + 52}" fill="white"/>\n{body}\n</svg>\n'
    )


def _shapes(found: Sequence[Merge], natural: Sequence[Point]) -> Iterator[str]:
    yield _text(LEFT, 20, "Share of the gap closed, against the KL of the routing", 15, "start")
    x = LEFT
    for regime, colour in COLOURS.items():
        yield f'<circle cx="{x + 5}" cy="38" r="4" fill="{colour}"/>'
        yield _text(x + 14, 42, f"synthetic, {regime}", 12, "start")
        x += 130
    yield f'<path d="{_diamond(x + 5, 38)}" fill="black"/>'
    yield _text(x + 14, 42, "natural text", 12, "start")
    for number, (repair, title) in enumerate(TITLES.items()):
        left = LEFT + number * (PANEL + GAP)
        yield _text(left + PANEL / 2, TOP - 4, title, 13)
        for share in (-0.5, 0, 0.5, 1):
            yield f'<path d="M{left} {_down(share)}h{PANEL}" stroke="#dddddd"/>'
            yield _text(left - 4, _down(share) + 4, f"{share:.0%}".replace("-", "−"), 11, "end")
        for kl in (0.03, 0.1, 0.3, 1.0):
            yield _text(_across(left, kl), TOP + HEIGHT + 18, f"{kl:g}", 11)
        yield _text(left + PANEL / 2, TOP + HEIGHT + 38, "KL of the routing, nats", 12)
        for regime, colour in COLOURS.items():
            own = [one for one in found if one.regime == regime]
            places = ((_across(left, one.kl), _down(getattr(one, repair))) for one in own)
            dots = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in places)  # round ends of empty lines
            yield (
                f'<path d="{dots}" stroke="{colour}" stroke-width="4" stroke-linecap="round" '
                'opacity="0.5"/>'
            )
        for point in natural:
            if point.repair == repair:
                at = _across(left, point.kl), _down(point.share)
                yield f'<path d="{_diamond(*at)}" fill="black"/>'


def _across(left: float, kl: float) -> float:
    least, most = map(math.log, KLS)
    kept = min(max(math.log(kl), least), most)
    return round(left + PANEL * (kept - least) / (most - least), 1)


def _down(share: float) -> float:
    least, most = SHARES
    return round(TOP + HEIGHT * (most - min(max(share, least), most)) / (most - least), 1)


def _diamond(x: float, y: float) -> str:
    return f"M{x} {y - 6}l6 6l-6 6l-6 -6z"


def _text(x: float, y: float, words: str, size: int, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'
