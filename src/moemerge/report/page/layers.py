"""Charts over the layers: mismatch, divergence, drift, swapped routers, and refit errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moemerge.report.page.plots import (
    Chart,
    Choice,
    DiagnosisRow,
    Group,
    Line,
    Reading,
    View,
    axis,
    ceiling,
    colour_of,
    emphasised_last,
    go,
    lines_of,
    log_ticks,
    over_layers,
    plot,
    rounded,
    safe,
    series,
    trace_of,
)
from moemerge.runtime.formatting import Quantity, known_mean, number, percent, plain, short

PANEL_HEIGHT = 220
TITLE = 40
SCALES = ("linear", "logarithmic")


@dataclass(frozen=True)
class Panel:
    """A figure that is drawn over the layers."""

    key: str
    title: str
    quantity: Quantity
    floor: float  # least end of the axis: noise should not fill a panel
    alone: str | None = None  # the same figure with both routers on the model's features
    logarithmic: bool = False  # selectable


MISMATCH = Panel("mismatch", "Mismatched choices", Quantity.SHARE, 0.02)
KL = Panel("kl", "KL divergence", Quantity.NATS, 1e-3, "kl_on_features", logarithmic=True)
DRIFT = Panel("drift", "Drift of the router's input", Quantity.SHARE, 0.02)


def alone_line(line: Line) -> Line:
    return replace(line, label=f"{line.label}, routers alone", dash="dot", width=1.5, tag="")


def panels(reading: Reading, what: Panel) -> Group:
    """Return one panel per domain with one line per model, all with the same axes."""
    keys = [what.key] + ([what.alone] if what.alone else [])
    values = [v for key in keys for v in series(reading.layers, key)]
    top = ceiling(values, what.floor)
    low = min((v for v in values if v), default=what.floor)
    ends = [math.log10(low / 1.3), math.log10(top)]
    logarithmic = {"type": "log", "range": ends, **log_ticks(ends)}
    scales = ({"yaxis": {"type": "linear"}}, {"yaxis": logarithmic}) if what.logarithmic else ()
    charts = tuple(
        _panel(reading, what, domain, top, scales, f"{what.key}-{i}")
        for i, domain in enumerate(reading.domains)
    )
    lines = list(lines_of(reading).values())
    if what.alone:
        lines.append(alone_line(lines[0]))
    choices = (Choice("Scale", SCALES),) if what.logarithmic else ()
    return Group(what.key, charts, what.title, choices, tuple(lines), columns=min(3, len(charts)))


def _panel(
    reading: Reading,
    what: Panel,
    domain: str,
    top: float,
    scales: Sequence[Mapping[str, Any]],
    key: str,
) -> Chart:
    traces = []
    lines = lines_of(reading)
    # On the axis, and in the hover box.
    tick, shown = (".0%", ".1%") if what.quantity is Quantity.SHARE else ("~g", ".3~g")
    for model in emphasised_last(reading):
        rows = reading.rows(model, domain)
        numbers = [int(row["layer"]) for row in rows]
        if what.alone and model == reading.models[0]:
            dotted = trace_of(alone_line(lines[model]), numbers, series(rows, what.alone), shown)
            dotted.mode = "lines" if len(rows) > 1 else "markers"
            traces.append(dotted)
        traces.append(trace_of(lines[model], numbers, series(rows, what.key), shown))
    layers = sorted({int(row["layer"]) for row in reading.layers})
    drawn = over_layers(traces, layers, top, height=PANEL_HEIGHT, tick=tick)
    note = _note(reading, what, domain)
    unchanged: tuple[dict[str, Any], ...] = tuple({} for _ in traces)
    views = {str(i): View(note, unchanged, layout) for i, layout in enumerate(scales)}
    return Chart(key, short(domain, TITLE), note, drawn, views)


def _note(reading: Reading, what: Panel, domain: str) -> str:
    """Describe a panel: the diagnosed model's mean and worst layer, and the other's mean."""
    first, *others = reading.models
    rows = reading.rows(first, domain)
    text = f"mean {_mean_text(reading, what, first, domain)}"
    if others:
        text = f"{short(reading.names[first])}: {text}"
    values = [(number(row.get(what.key)) or 0.0, int(row["layer"])) for row in rows]
    value, layer = max(values, default=(0.0, 0))
    if value:
        text += f", highest in layer {layer}: {what.quantity.text(value)}"
    if len(others) == 1:
        other = short(reading.names[others[0]])
        text += f"; {other}: mean {_mean_text(reading, what, others[0], domain)}"
    return text


def _mean_text(reading: Reading, what: Panel, model: str, domain: str) -> str:
    return what.quantity.text(known_mean(series(reading.rows(model, domain), what.key)))


# --- routers exchanged --------------------------------------------------------------------------

SWAP_HEIGHT = 280
# Total characters of the domains' names on the axis.
NAMES_WIDTH = 48
MODEL = "model"
Pair = tuple[bool, bool]  # (the weights are the model's, the routers are the model's)
# Zero is the source with its own routers.
PAIRS: tuple[Pair, ...] = ((True, True), (True, False), (False, True))


def swaps(reading: Reading) -> Group | None:
    """Return bars for each domain: the mismatch, and the loss above the source's."""
    by_pair = _by_pair(reading)
    if not by_pair:
        return None
    charts = []
    for key, title, shown in (
        ("mismatch", "Mismatched choices", ".1%"),
        ("loss", "Loss above the source, nats per token", "+.3f"),
    ):
        bars = {pair: _heights(reading, rows, key) for pair, rows in by_pair.items()}
        if any(value is not None for heights in bars.values() for value in heights):
            charts.append(_swap_chart(reading, key, title, shown, bars))
    return Group("swap", tuple(charts), columns=2) if charts else None


def _by_pair(reading: Reading) -> dict[Pair, dict[str, DiagnosisRow]]:
    """Return swaps by combination and domain; the unchanged model comes from the totals."""
    if not reading.swaps:
        return {}
    unchanged = {d: reading.total(reading.models[0], d) for d in reading.domains}
    by_pair: dict[Pair, dict[str, DiagnosisRow]] = {(True, True): unchanged}
    for row in reading.swaps:
        pair = (row["weights_of"] == MODEL, row["routers_of"] == MODEL)
        by_pair.setdefault(pair, {}).setdefault(str(row["domain"]), row)
    return {pair: by_pair[pair] for pair in PAIRS if pair in by_pair}


def _heights(reading: Reading, rows: dict[str, DiagnosisRow], key: str) -> list[float | None]:
    heights = []
    for domain in reading.domains:
        value = number(rows.get(domain, {}).get(key))
        if key == "loss" and value is not None:
            own = number(reading.total(reading.models[0], domain).get("loss_source"))
            value = None if own is None else value - own
        heights.append(None if value is None else round(value, 5))
    return heights


def _swap_chart(
    reading: Reading, key: str, title: str, shown: str, bars: dict[Pair, list[float | None]]
) -> Chart:
    traces = [_bars(reading, pair, heights, shown) for pair, heights in bars.items()]
    values = [value for heights in bars.values() for value in heights if value is not None]
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.14 * (high - low) or 0.01
    drawn = plot(
        traces,
        height=SWAP_HEIGHT,
        barmode="group",
        uniformtext={"minsize": 9, "mode": "hide"},
        bargap=0.3,
        bargroupgap=0.08,
        showlegend=True,
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
    return Chart(f"swap-{key}", title, _swap_note(key, bars), drawn)


def _bars(reading: Reading, pair: Pair, heights: list[float | None], shown: str) -> Any:
    """Colours show whose weights these are; hatched bars have the other model's routers."""
    own_weights, own_routers = pair
    name = "model" if own_weights else "source"
    if own_weights != own_routers:
        name += ", model's routers" if own_routers else ", source's routers"
    colour = lines_of(reading)[reading.models[0]].colour if own_weights else "var(--source)"
    hatched = "" if own_weights == own_routers else "/"
    return go.Bar(
        x=_ticks(reading.domains),
        y=heights,
        name=name,
        marker={
            "color": colour,
            "line": {"width": 1, "color": colour},
            "pattern": {"shape": hatched, "fillmode": "replace", "size": 6, "solidity": 0.35},
        },
        texttemplate=f"%{{y:{shown.lstrip('+')}}}",
        textposition="outside",
        textangle=0,
        textfont={"size": 11, "color": "var(--ink)"},
        cliponaxis=False,
        hovertemplate=f"%{{x}}: %{{y:{shown}}}<extra>{name}</extra>",
    )


def _ticks(domains: Sequence[str]) -> list[str]:
    """Shorten names to fit next to each other, and keep them different."""
    room = max(6, NAMES_WIDTH // len(domains))
    names = [safe(short(domain, room)) for domain in domains]
    return (
        names if len(set(names)) == len(names) else [f"{i + 1}: {n}" for i, n in enumerate(names)]
    )


def _swap_note(key: str, bars: dict[Pair, list[float | None]]) -> str:
    """Describe how much of the damage the source's routers undo in the model."""
    kept, put = bars.get((True, True), []), bars.get((True, False), [])
    pairs = [(a, b) for a, b in zip(kept, put, strict=False) if a is not None and b is not None]
    if not pairs:
        return "zero is the unchanged source"
    before, after = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    words = percent if key == "mismatch" else "{:+.3f}".format
    return f"the source's routers in the model: {words(after)} instead of {words(before)}"


# --- refit ----------------------------------------------------------------------------------------

HEIGHT = 230
ROW_HEIGHT = 22
HEAD = "head"
ON = {"calibration": "Error left, calibration rows", "held_out": "Error left, rows held out"}


def refit_charts(reading: Reading) -> tuple[Group, ...]:
    """Return the charts of a refit; none if no model was refitted."""
    rows = reading.refit.get("layers", ())
    errors = [chart for on in ON if (chart := _errors(rows, on)) is not None]
    drifts = _drifts(reading, rows)
    groups = [Group("refit-errors", tuple(errors), columns=len(errors))] if errors else []
    if drifts:
        groups.append(Group("refit-drift", drifts, "Drift", columns=min(3, len(drifts))))
    return tuple(groups)


def _errors(rows: Sequence[DiagnosisRow], on: str) -> Chart | None:
    """Kinds of maps run downwards, layers to the right."""
    shares = [row.get("error_left", {}).get(on, {}) for row in rows]
    kinds = list(dict.fromkeys(kind for own in shares for kind in own))
    if not kinds:
        return None
    where = [HEAD if row["layer"] is None else str(row["layer"]) for row in rows]
    values = [[rounded(number(own.get(kind)), 3) for own in shares] for kind in kinds]
    trace = go.Heatmap(
        x=where,
        y=[safe(short(kind, TITLE)) for kind in kinds],
        z=values,
        zmin=0,
        zmax=1,
        colorscale=[[i / 3, f"var(--heat-{i})"] for i in range(4)],
        xgap=0.6,
        ygap=0.6,
        hovertemplate="Layer %{x}, %{y}: %{z:.1%}<extra></extra>",
        colorbar={"thickness": 8, "outlinewidth": 0, "ticks": "", "tickformat": ".0%"},
    )
    drawn = plot(
        [trace],
        height=max(HEIGHT, 90 + ROW_HEIGHT * len(kinds)),
        xaxis=axis("Layer", type="category", showgrid=False, nticks=12),
        yaxis=axis(type="category", autorange="reversed", showgrid=False, automargin=True),
    )
    mean = known_mean(value for line in values for value in line)
    note = f"mean over the tiles {percent(mean)}; 100% is the unrepaired merge"
    return Chart(f"refit-{on}", ON[on], note, drawn)


def _drifts(reading: Reading, rows: Sequence[DiagnosisRow]) -> tuple[Chart, ...]:
    """Return a chart for each domain, all with the same axes."""
    known = [row for row in rows if row["layer"] is not None and row.get("drift_after")]
    names = list(dict.fromkeys(name for row in known for name in row["drift_after"]))
    layers = [int(row["layer"]) for row in known]
    lines = (
        Line("as merged", "var(--other)"),
        Line("refitted", colour_of(reading, reading.refitted), width=2.5),
    )
    values = {
        name: [
            [rounded(number(row.get(key, {}).get(name))) for row in known]
            for key in ("drift_before", "drift_after")
        ]
        for name in names
    }
    top = ceiling([v for pair in values.values() for line in pair for v in line], 0.02)
    charts = []
    for at, (name, pair) in enumerate(values.items()):
        traces = [
            trace_of(line, layers, own, ".3~g") for line, own in zip(lines, pair, strict=True)
        ]
        drawn = over_layers(traces, layers, top, height=HEIGHT)
        note = f"last layer: {_last(pair[0])} before (grey), {_last(pair[1])} refitted"
        charts.append(Chart(f"refit-drift-{at}", short(name, TITLE), note, drawn))
    return tuple(charts)


def _last(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return plain(known[-1]) if known else "unknown"
