"""plotly, and what every chart of the page has in common.

Colours are names of the style sheet's variables, `var(--accent)`: the page puts in the values of
the theme in force when it draws, so that a chart is the same data by day and by night.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moemerge.report.page.reading import Reading
from moemerge.report.words import Quantity, short

# Untyped, and an extra: this module is imported only after `require_page`.
go: Any = importlib.import_module("plotly.graph_objects")

# Up to so many layers every point gets its marker; beyond it a line reads better without.
MARKED_LAYERS = 32
HOVER_LABEL = 22


@dataclass(frozen=True)
class Choice:
    """A select above a group of charts."""

    label: str
    options: tuple[str, ...]
    chosen: int = 0


@dataclass(frozen=True)
class View:
    """What a chart shows for one combination of choices: changes of its traces, and its note.

    `data` has a change for each trace; a text "@one" in it stands for that array of the page, and
    "@one-@other" for a difference, which is not worth its place in the page. Without `data` there
    is nothing to draw, and the note says why.
    """

    note: str
    data: tuple[Mapping[str, Any], ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """A plot with its words. `views` are by the numbers of the chosen options, "0,2".

    `arrays` are for its views and those of all other charts: what several draw is brought once.
    """

    key: str
    title: str
    note: str
    plot: Any
    height: int = 230
    views: Mapping[str, View] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
        """Plain data for the page's script."""
        plotted = self.plot.to_plotly_json()
        return {
            "key": self.key,
            "data": plotted["data"],
            "layout": plotted["layout"],
            "arrays": dict(self.arrays),
            "views": {
                key: {"note": view.note, "data": list(view.data), "layout": dict(view.layout)}
                for key, view in self.views.items()
            },
        }


@dataclass(frozen=True)
class Line:
    """How a model is drawn, in every chart and in the keys beside them."""

    label: str
    colour: str
    symbol: str = "circle"
    dash: str = "solid"
    width: float = 2.0
    tag: str = ""  # why it stands out


@dataclass(frozen=True)
class Group:
    """Charts that stand together: under one heading, with one key and the same choices."""

    key: str
    charts: tuple[Chart, ...]
    title: str = ""
    choices: tuple[Choice, ...] = ()
    lines: tuple[Line, ...] = ()
    columns: int = 1


# A model's colour and symbol are the same throughout. The colours of gains and losses, of heat
# maps and of sources are others; a dotted line is always the routers alone.
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


def colour_of(reading: Reading, model: str) -> str:
    index = reading.models.index(model) if model in reading.models else 0
    return f"var(--model-{index % len(SYMBOLS)})"


def lines_of(reading: Reading) -> dict[str, Line]:
    """Every model's line; one that is recommended stands out."""
    return {
        model: Line(
            name,
            colour_of(reading, model),
            SYMBOLS[index % len(SYMBOLS)],
            width=3.0 if model in reading.tags else 1.75,
            tag=reading.tags.get(model, ""),
        )
        for index, (model, name) in enumerate(reading.names.items())
    }


def emphasised_last(reading: Reading) -> list[str]:
    """The models in the order in which they are drawn: those that stand out on top."""
    return sorted(reversed(reading.models), key=lambda model: model in reading.tags)


def safe(text: str) -> str:
    """A label inside a chart: plotly reads tags and `%{…}` in it, and a label has neither."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def tag(label: str) -> str:
    """A label short enough for a hover box."""
    return safe(short(label, HOVER_LABEL))


def plot(traces: Sequence[Any], *, height: int, **layout: Any) -> Any:
    """What all plots look like is in page.js, beside the style sheet."""
    return go.Figure(data=list(traces), layout={"template": None, "height": height, **layout})


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **settings}


def layer_axis(layers: Sequence[int]) -> dict[str, Any]:
    """Whole layer numbers, half a layer of air on both sides, no vertical lines."""
    low, high = (min(layers), max(layers)) if layers else (0, 1)
    room = max(0.5, 0.02 * (high - low))
    many = high - low > 12
    return axis(
        "Layer",
        range=[low - room, high + room],
        showgrid=False,
        tickformat="d",
        unifiedhovertitle={"text": "<b>Layer %{x}</b>"},
        **({"nticks": 9} if many else {"dtick": 1 if high - low < 9 else 2}),
    )


def formats(quantity: Quantity) -> tuple[str, str]:
    """plotly's number formats for a quantity: on an axis, and in the hover."""
    return (".0%", ".1%") if quantity is Quantity.SHARE else ("~g", ".3~g")


def log_ticks(ends: Sequence[float]) -> dict[str, Any]:
    """Ticks of a logarithmic axis between two exponents: decades, or 1, 2, 5 where it is short."""
    decades = ends[1] - ends[0]
    if decades < 0.5:
        return {"tickformat": "~g", "dtick": "D1"}
    if decades < 2:
        return {"tickformat": "~g", "dtick": "D2"}
    return {"tickformat": "~g", "dtick": max(1, round(decades / 4))}


def ceiling(values: Sequence[float | None], floor: float) -> float:
    """The top of an axis that starts at zero: above every value, and never a speck."""
    return 1.05 * max([floor, *(value for value in values if value is not None)])


def trace_of(line: Line, x: Sequence[int], y: Sequence[float | None], shown: str) -> Any:
    """A line over the layers; `shown` formats a value in the hover."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        mode="lines+markers" if len(x) <= MARKED_LAYERS else "lines",
        name=tag(line.label),
        line={"color": line.colour, "dash": line.dash, "width": line.width},
        marker={"color": line.colour, "symbol": line.symbol, "size": 4.5 + line.width},
        hovertemplate=f"%{{y:{shown}}}<extra>{tag(line.label)}</extra>",
    )
