"""What the routers do to the loss: weights of one model with the routers of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moemerge.report.page.plots import Chart, Group, axis, figure, go, safe
from moemerge.report.page.reading import Reading, Row, number, percent
from moemerge.report.words import short

HEIGHT = 280
# Characters of a domain's name on the axis: of all of them together.
NAMES_WIDTH = 48
MODEL = "model"
NAMES = {
    (True, True): "model as it is",
    (True, False): "model with the source's routers",
    (False, True): "source with the model's routers",
}
COLOURS = {
    (True, True): "var(--accent)",
    (True, False): "var(--accent-soft)",
    (False, True): "var(--other)",
}
Pair = tuple[bool, bool]  # are the weights the model's, are the routers?


def swaps(reading: Reading) -> Group | None:
    """Bars for each domain: the mismatch, and the loss above the source's own."""
    found = _by_pair(reading)
    if not found:
        return None
    charts = []
    for key, title, shown in (
        ("mismatch", "Mismatched choices", ".1%"),
        ("loss", "Loss above the source, nats per token", "+.3f"),
    ):
        bars = {pair: _heights(reading, rows, key) for pair, rows in found.items()}
        if any(value is not None for heights in bars.values() for value in heights):
            charts.append(_chart(reading, key, title, shown, bars))
    return Group("swap", tuple(charts), columns=2) if charts else None


def _by_pair(reading: Reading) -> dict[Pair, dict[str, Row]]:
    """Swaps by what was combined, then by domain; the model as it is comes from the totals."""
    if not reading.swaps:
        return {}
    first = reading.models[0]
    as_it_is = {d: reading.total(first, d) for d in reading.domains}
    found: dict[Pair, dict[str, Row]] = {(True, True): {d: r for d, r in as_it_is.items() if r}}
    for row in reading.swaps:
        pair = (row["weights_of"] == MODEL, row["routers_of"] == MODEL)
        if pair in NAMES:  # the source with its own routers is the zero of both axes
            found.setdefault(pair, {})[str(row["domain"])] = row
    return {pair: found[pair] for pair in NAMES if pair in found}


def _heights(reading: Reading, rows: dict[str, Row], key: str) -> list[float | None]:
    heights = []
    for domain in reading.domains:
        value = number(rows.get(domain, {}).get(key))
        if key == "loss" and value is not None:
            own = number(reading.total(reading.models[0], domain).get("loss_source"))
            value = None if own is None else value - own
        heights.append(None if value is None else round(value, 5))
    return heights


def _chart(
    reading: Reading, key: str, title: str, shown: str, bars: dict[Pair, list[float | None]]
) -> Chart:
    traces = [_bars(reading, pair, heights, shown) for pair, heights in bars.items()]
    values = [value for heights in bars.values() for value in heights if value is not None]
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.14 * (high - low) or 0.01
    drawn = figure(
        traces,
        height=HEIGHT,
        barmode="group",
        uniformtext={"minsize": 9, "mode": "hide"},
        bargap=0.3,
        bargroupgap=0.08,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.04, "yanchor": "bottom", "traceorder": "normal"},
        margin={"l": 38, "r": 10, "t": 30, "b": 30},
        xaxis=axis(showgrid=False, type="category"),
        yaxis=axis(
            range=[low - (room if low < 0 else 0), high + room],
            tickformat=".0%" if key == "mismatch" else "~g",
            nticks=5,
            zeroline=True,
            zerolinecolor="var(--line-strong)",
        ),
    )
    return Chart(f"swap-{key}", title, _note(key, bars), drawn, HEIGHT)


def _bars(reading: Reading, pair: Pair, heights: list[float | None], shown: str) -> Any:
    return go.Bar(
        x=_ticks(reading.domains),
        y=heights,
        name=NAMES[pair],
        marker={"color": COLOURS[pair], "line": {"width": 0}},
        texttemplate=f"%{{y:{shown.lstrip('+')}}}",
        textposition="outside",
        textangle=0,
        textfont={"size": 11, "color": "var(--ink)"},
        cliponaxis=False,
        hovertemplate=f"%{{x}}: %{{y:{shown}}}<extra>{NAMES[pair]}</extra>",
    )


def _ticks(domains: Sequence[str]) -> list[str]:
    """Names short enough to stand side by side, and still different from each other."""
    room = max(6, NAMES_WIDTH // len(domains))
    names = [safe(short(domain, room)) for domain in domains]
    return (
        names if len(set(names)) == len(names) else [f"{i + 1}: {n}" for i, n in enumerate(names)]
    )


def _note(key: str, bars: dict[Pair, list[float | None]]) -> str:
    """How much of the damage goes when the source's routers are put into the model."""
    kept, put = bars.get((True, True), []), bars.get((True, False), [])
    pairs = [(a, b) for a, b in zip(kept, put, strict=False) if a is not None and b is not None]
    if not pairs:
        return "zero is the source as it is"
    before, after = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    words = percent if key == "mismatch" else "{:+.3f}".format
    return f"the source's routers in the model: {words(after)} instead of {words(before)}"
