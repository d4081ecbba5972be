"""Figures over the layers: mismatch, divergence and drift, a panel for each domain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moemerge.report.page.plots import (
    Chart,
    Choice,
    Group,
    Line,
    View,
    axis,
    ceiling,
    figure,
    layer_axis,
    line_of,
    log_ticks,
    trace_of,
)
from moemerge.report.page.reading import (
    Reading,
    Row,
    mean,
    number,
    percent,
    plain,
    series,
)
from moemerge.report.words import short

ROUTER_ALONE = "routers alone"
PANEL_HEIGHT = 220
TITLE = 40
SCALES = ("linear", "logarithmic")


@dataclass(frozen=True)
class Figure:
    """A figure of the rows, and how it is shown."""

    key: str
    title: str
    tick: str  # plotly's number format on the axis
    shown: str  # ... in the hover
    floor: float  # the axis reaches at least so far: noise should not fill a panel
    alone: str | None = None  # the same with both routers on the model's features
    logarithmic: bool = False  # offered as a choice

    def words(self, value: float | None) -> str:
        return percent(value) if self.tick.endswith("%") else plain(value)


MISMATCH = Figure("mismatch", "Mismatched choices", ".0%", ".1%", 0.02)
KL = Figure("kl", "KL divergence", "~g", ".3~g", 1e-3, alone="kl_on_features", logarithmic=True)
DRIFT = Figure("drift", "Drift of the router's input", ".0%", ".1%", 0.02)


def model_lines(reading: Reading) -> tuple[Line, ...]:
    return tuple(line_of(i, name) for i, name in enumerate(reading.names.values()))


def alone_line(line: Line) -> Line:
    return Line(ROUTER_ALONE, line.colour, "dot", 1.5)


def panels(reading: Reading, what: Figure) -> Group:
    """One panel a domain, one line a model, the same axes in all."""
    keys = [what.key] + ([what.alone] if what.alone else [])
    values = [v for key in keys for v in series(reading.layers, key)]
    top = ceiling(values, what.floor)
    low = min((v for v in values if v), default=what.floor)
    scales = _scales(low, top) if what.logarithmic else ()
    charts = tuple(
        _panel(reading, what, domain, top, scales, f"{what.key}-{i}")
        for i, domain in enumerate(reading.domains)
    )
    lines = model_lines(reading)
    if what.alone:
        lines += (alone_line(lines[0]),)
    choices = (Choice("Scale", SCALES),) if what.logarithmic else ()
    columns = min(3, len(charts))
    return Group(what.key, charts, what.title, choices, lines, columns)


def _scales(low: float, top: float) -> tuple[Mapping[str, Any], ...]:
    """The y axis for each of the scales."""
    ends = [math.log10(low / 1.3), math.log10(top)]
    logarithmic = {"type": "log", "range": ends, **log_ticks(ends)}
    return {"yaxis": {"type": "linear"}}, {"yaxis": logarithmic}


def _panel(
    reading: Reading,
    what: Figure,
    domain: str,
    top: float,
    scales: Sequence[Mapping[str, Any]],
    key: str,
) -> Chart:
    traces = []
    lines = model_lines(reading)
    # The diagnosed model is drawn last, on top of the others.
    for model, line in reversed(list(zip(reading.models, lines, strict=True))):
        rows = reading.rows(model, domain)
        numbers = [int(row["layer"]) for row in rows]
        if what.alone and line is lines[0]:
            dotted = trace_of(alone_line(line), numbers, series(rows, what.alone), what.shown)
            dotted.mode = "lines" if len(rows) > 1 else "markers"
            traces.append(dotted)
        traces.append(trace_of(line, numbers, series(rows, what.key), what.shown))
    layers = sorted({int(row["layer"]) for row in reading.layers})
    drawn = figure(
        traces,
        height=PANEL_HEIGHT,
        hovermode="x unified",
        xaxis=layer_axis(layers),
        yaxis=axis(range=[0, top], tickformat=what.tick, nticks=5),
    )
    note = _note(reading, what, domain)
    unchanged: tuple[dict[str, Any], ...] = tuple({} for _ in traces)
    views = {str(i): View(note, unchanged, layout) for i, layout in enumerate(scales)}
    return Chart(key, short(domain, TITLE), note, drawn, PANEL_HEIGHT, views)


def _note(reading: Reading, what: Figure, domain: str) -> str:
    """The panel in words: the mean (of each model, where there are two), and the worst layer."""
    first = reading.rows(reading.models[0], domain)
    means = [mean(series(reading.rows(model, domain), what.key)) for model in reading.models]
    text = f"mean {what.words(means[0])}"
    if len(means) == 2:
        text += f" against {what.words(means[1])}"
    return text + _worst(what, first)


def _worst(what: Figure, rows: Sequence[Row]) -> str:
    found = [(number(row.get(what.key)) or 0.0, int(row["layer"])) for row in rows]
    value, layer = max(found, default=(0.0, 0))
    return f", highest in layer {layer}: {what.words(value)}" if value else ""
