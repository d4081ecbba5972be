"""plotly, and what every figure of the page has in common.

Colours are names of the style sheet's variables, `var(--accent)`: the page puts in the values of
the theme in force when it draws, so that a figure is the same data by day and by night.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moemerge.report.words import short

# Untyped, and an extra: this module is imported only after `require_page`.
go: Any = importlib.import_module("plotly.graph_objects")

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
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
    """A figure with its words. `views` are by the numbers of the chosen options, "0,2".

    `arrays` are for its views and those of all other charts: what several draw is brought once.
    """

    key: str
    title: str
    note: str
    figure: Any
    height: int = 230
    views: Mapping[str, View] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)

    def payload(self) -> dict[str, Any]:
        """Plain data for the page's script."""
        plotted = self.figure.to_plotly_json()
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
    """How a model is drawn, in a chart and in the key beside it."""

    label: str
    colour: str
    dash: str
    width: float = 2.0


@dataclass(frozen=True)
class Group:
    """Charts that stand together: under one heading, with one key and the same choices."""

    key: str
    charts: tuple[Chart, ...]
    title: str = ""
    choices: tuple[Choice, ...] = ()
    lines: tuple[Line, ...] = ()
    columns: int = 1


# The diagnosed model has the accent; those it is compared with stay grey and differ by their dash.
_STYLES = (
    ("var(--accent)", "solid", 2.5),
    ("var(--other)", "solid", 2.0),
    ("var(--other)", "dash", 2.0),
    ("var(--other)", "dot", 2.0),
    ("var(--other)", "dashdot", 2.0),
)


def line_of(index: int, label: str) -> Line:
    colour, dash, width = _STYLES[min(index, len(_STYLES) - 1)]
    return Line(label, colour, dash, width)


def safe(text: str) -> str:
    """A label inside a figure: plotly reads tags and `%{…}` in it, and a label has neither."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def tag(label: str) -> str:
    """A label short enough for a hover box."""
    return safe(short(label, HOVER_LABEL))


def figure(traces: Sequence[Any], *, height: int, **layout: Any) -> Any:
    """A figure in the page's dress: no frame, hair lines, its words in the surrounding page."""
    base: dict[str, Any] = {
        "template": None,
        "height": height,
        "margin": {"l": 38, "r": 10, "t": 8, "b": 38},
        "paper_bgcolor": "var(--surface)",
        "plot_bgcolor": "var(--surface)",
        "font": {"family": FONT, "size": 12, "color": "var(--muted)"},
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line-strong)",
            "font": {"family": FONT, "size": 12.5, "color": "var(--ink)"},
            "align": "left",
        },
        "showlegend": False,
        "dragmode": False,
    }
    return go.Figure(data=list(traces), layout={**base, **layout})


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "title": {"text": title, "font": {"size": 12}, "standoff": 6},
        "gridcolor": "var(--grid)",
        "zeroline": False,
        "showline": False,
        "ticks": "",
        "fixedrange": True,
        "automargin": True,
    }
    return {**base, **settings}


def layer_axis(layers: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Whole layer numbers, half a layer of air on both sides, no vertical lines."""
    low, high = (min(layers), max(layers)) if layers else (0, 1)
    room = max(0.5, 0.02 * (high - low))
    many = high - low > 12
    base = axis(
        "Layer",
        range=[low - room, high + room],
        showgrid=False,
        tickformat="d",
        unifiedhovertitle={"text": "<b>Layer %{x}</b>"},
        spikecolor="var(--line-strong)",
        spikethickness=1,
        spikedash="solid",
        **({"nticks": 9} if many else {"dtick": 1 if high - low < 9 else 2}),
    )
    return {**base, **settings}


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
        marker={"color": line.colour, "size": 5.5},
        hovertemplate=f"%{{y:{shown}}}<extra>{tag(line.label)}</extra>",
    )
