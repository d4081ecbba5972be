"""Parts that all charts share: the document, plotly, colours, axes.

Colours are variables of the style sheet, `var(--accent)`. The page inserts the values of the
current theme when it draws, so the data of a chart do not depend on the theme.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moemerge.runtime.formatting import FigureWords, display_names, number, short

DiagnosisRow = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """A diagnosis' document with its rows indexed. The diagnosed model comes first in `models`."""

    document: Mapping[str, Any]

    @cached_property
    def figures(self) -> dict[str, FigureWords]:
        """The names and descriptions of all figures."""
        words = map(FigureWords.from_json, self.document["figures"])
        return {figure.name: figure for figure in words}

    @cached_property
    def labels(self) -> dict[str, str]:
        """The models' full labels (paths, hub ids), by their names in the rows."""
        return {model["name"]: model["label"] for model in self.document["models"]}

    @cached_property
    def names(self) -> dict[str, str]:
        """The models' names on the page: as much of their labels as keeps them different."""
        return dict(zip(self.labels, display_names([*self.labels.values()]), strict=True))

    @property
    def models(self) -> list[str]:
        return list(self.labels)

    @cached_property
    def tags(self) -> dict[str, str]:
        """The models that are marked: as recommended, or as one of two candidates."""
        best = self.document["verdict"]["recommended"]
        if len(self.labels) < 2:
            return {}
        if len(best) == 1:
            return {best[0]: "recommended"}
        return {best[0]: "routes best", best[1]: "predicts best"}

    @property
    def domains(self) -> list[str]:
        return list(self.document["domains"])

    @property
    def layers(self) -> list[DiagnosisRow]:
        return list(self.document["layers"])

    @property
    def totals(self) -> list[DiagnosisRow]:
        return list(self.document["totals"])

    @property
    def swaps(self) -> list[DiagnosisRow]:
        return list(self.document["swaps"])

    @property
    def calibration(self) -> DiagnosisRow:
        return self.document["calibration"] or {}

    @property
    def calibrated(self) -> str:
        """The model that the calibration report belongs to."""
        return str(self.document["calibration_of"] or self.models[0])

    @property
    def refit(self) -> DiagnosisRow:
        return self.document["refit"] or {}

    @property
    def refitted(self) -> str:
        """The model that the refit report belongs to."""
        return str(self.document["refit_of"] or self.models[0])

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], list[DiagnosisRow]]:
        pairs: dict[tuple[str, str], list[DiagnosisRow]] = {}
        for row in self.layers:
            pairs.setdefault((str(row["model"]), str(row["domain"])), []).append(row)
        for rows in pairs.values():
            rows.sort(key=lambda row: int(row["layer"]))
        return pairs

    def rows(self, model: str, domain: str) -> list[DiagnosisRow]:
        """Return one model's rows on one domain, by layer."""
        return self._by_pair.get((model, domain), [])

    def total(self, model: str, domain: str) -> DiagnosisRow:
        rows = (r for r in self.totals if r["model"] == model and r["domain"] == domain)
        return next(rows)

    def source_label(self, domain: str) -> str:
        return str(self.document["sources"][domain]["label"])

    def reference(self, domain: str) -> str:
        """Return a domain's reference: its source, or the base."""
        return str(self.document["domains"][domain]["reference"]).capitalize()

    @cached_property
    def worst(self) -> DiagnosisRow:
        """Return the row of the diagnosed model with the highest mismatch."""
        own = [row for row in self.layers if row["model"] == self.models[0]]
        return max(own, key=lambda row: number(row.get("mismatch")) or 0.0)


def series(rows: Iterable[DiagnosisRow], key: str) -> list[float | None]:
    """Return one figure of several rows, with the digits that a chart can show."""
    return [rounded(number(row.get(key))) for row in rows]


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


# Untyped, and an extra: this module is imported only after `require_page`.
go: Any = importlib.import_module("plotly.graph_objects")

# Up to this many layers, every point has a marker.
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
    """The state of a chart for one combination of choices: changes of its traces, and its note.

    `data` has a change for each trace. A text "@one" in it refers to that array of the page, and
    "@one-@other" to a difference, which need not be stored. Without `data` there is nothing to
    draw, and the note states why.
    """

    note: str
    data: tuple[Mapping[str, Any], ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """A plot with its texts. `views` are keyed by the numbers of the chosen options, "0,2".

    `arrays` are shared by the views of all charts, so that each is stored once.
    """

    key: str
    title: str
    note: str
    plot: Any
    views: Mapping[str, View] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)

    @property
    def height(self) -> int:
        return int(self.plot.layout.height)

    def payload(self) -> dict[str, Any]:
        """Return plain data for the page's script."""
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
    """A model's style, in every chart and legend."""

    label: str
    colour: str
    symbol: str = "circle"
    dash: str = "solid"
    width: float = 2.0
    tag: str = ""  # why it is marked


@dataclass(frozen=True)
class Group:
    """Charts under one heading, with one legend and the same choices."""

    key: str
    charts: tuple[Chart, ...]
    title: str = ""
    choices: tuple[Choice, ...] = ()
    lines: tuple[Line, ...] = ()
    columns: int = 1


# A model has the same colour and symbol everywhere. Gains and losses, heat maps and sources have
# other colours. A dotted line is always the routers alone.
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


def colour_of(reading: Reading, model: str) -> str:
    index = reading.models.index(model) if model in reading.models else 0
    return f"var(--model-{index % len(SYMBOLS)})"


def lines_of(reading: Reading) -> dict[str, Line]:
    """Return every model's style; recommended ones are marked."""
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
    """Return the models in drawing order: marked ones last, on top."""
    return sorted(reversed(reading.models), key=lambda model: model in reading.tags)


def safe(text: str) -> str:
    """Escape a label inside a chart: plotly interprets tags and `%{…}`."""
    return html.escape(text, quote=False).replace("%{", "%&#123;")


def tag(label: str) -> str:
    """Return a label short enough for a hover box."""
    return safe(short(label, HOVER_LABEL))


def plot(traces: Sequence[Any], *, height: int, **layout: Any) -> Any:
    """Return a plot; page.js defines the common layout."""
    return go.Figure(data=list(traces), layout={"template": None, "height": height, **layout})


def over_layers(
    traces: Sequence[Any], layers: Sequence[int], top: float, *, height: int, tick: str = "~g"
) -> Any:
    """Return a plot of lines over the layers, from zero to `top`."""
    return plot(
        traces,
        height=height,
        hovermode="x unified",
        xaxis=layer_axis(layers),
        yaxis=axis(range=[0, top], tickformat=tick, nticks=5),
    )


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **settings}


def layer_axis(layers: Sequence[int]) -> dict[str, Any]:
    """An axis of whole layer numbers, with half a layer of margin and no vertical lines."""
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


def log_ticks(ends: Sequence[float]) -> dict[str, Any]:
    """Return ticks of a logarithmic axis between two exponents: decades, or 1, 2, 5."""
    decades = ends[1] - ends[0]
    if decades < 0.5:
        return {"tickformat": "~g", "dtick": "D1"}
    if decades < 2:
        return {"tickformat": "~g", "dtick": "D2"}
    return {"tickformat": "~g", "dtick": max(1, round(decades / 4))}


def ceiling(values: Sequence[float | None], floor: float) -> float:
    """Return the end of an axis that starts at zero: above every value, and never tiny."""
    return 1.05 * max([floor, *(value for value in values if value is not None)])


def trace_of(line: Line, x: Sequence[int], y: Sequence[float | None], shown: str) -> Any:
    """Return a line over the layers; `shown` formats a value in the hover box."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        mode="lines+markers" if len(x) <= MARKED_LAYERS else "lines",
        name=tag(line.label),
        line={"color": line.colour, "dash": line.dash, "width": line.width},
        marker={"color": line.colour, "symbol": line.symbol, "size": 4.5 + line.width},
        hovertemplate=f"%{{y:{shown}}}<extra>{tag(line.label)}</extra>",
    )
