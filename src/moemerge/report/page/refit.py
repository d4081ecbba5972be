"""Charts of a refit: what is left of each map's error, and how far the hidden states drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moemerge.report.page.plots import (
    Chart,
    Group,
    Line,
    Reading,
    Row,
    axis,
    ceiling,
    colour_of,
    go,
    layer_axis,
    plot,
    rounded,
    safe,
    trace_of,
)
from moemerge.report.words import mean, number, percent, plain, short

HEIGHT = 230
ROW_HEIGHT = 22
TITLE = 40
HEAD = "head"
ON = {"calibration": "Error left, calibration rows", "held_out": "Error left, rows held out"}


def refit(reading: Reading) -> tuple[Group, ...]:
    """Nothing where no model was refitted."""
    rows = [row for row in reading.refit.get("layers") or [] if "layer" in row]
    errors = [chart for on in ON if (chart := _errors(rows, on)) is not None]
    drifts = _drifts(reading, rows)
    groups = [Group("refit-errors", tuple(errors), columns=len(errors))] if errors else []
    if drifts:
        groups.append(Group("refit-drift", drifts, "Drift", columns=min(3, len(drifts))))
    return tuple(groups)


def _errors(rows: Sequence[Row], on: str) -> Chart | None:
    """Kinds of maps downwards, layers to the right."""
    shares = [_mapping(_mapping(row.get("error_left")).get(on)) for row in rows]
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
    height = max(HEIGHT, 90 + ROW_HEIGHT * len(kinds))
    drawn = plot(
        [trace],
        height=height,
        xaxis=axis("Layer", type="category", showgrid=False, nticks=12),
        yaxis=axis(type="category", autorange="reversed", showgrid=False, automargin=True),
    )
    known = [value for line in values for value in line if value is not None]
    note = f"mean over the tiles {percent(mean(known))}; 100% is as merged"
    return Chart(f"refit-{on}", ON[on], note, drawn, height)


def _drifts(reading: Reading, rows: Sequence[Row]) -> tuple[Chart, ...]:
    """A chart for each domain, with the same axes."""
    known = [row for row in rows if row["layer"] is not None and row.get("drift_after")]
    names = list(dict.fromkeys(name for row in known for name in row["drift_after"]))
    layers = [int(row["layer"]) for row in known]
    lines = (
        Line("as merged", "var(--other)"),
        Line("refitted", colour_of(reading, reading.refitted), width=2.5),
    )
    values = {
        name: [
            [rounded(number(_mapping(row.get(key)).get(name))) for row in known]
            for key in ("drift_before", "drift_after")
        ]
        for name in names
    }
    top = ceiling([v for pair in values.values() for line in pair for v in line], 0.02)
    charts = []
    for at, (name, pair) in enumerate(values.items()):
        drawn = plot(
            [trace_of(line, layers, own, ".3~g") for line, own in zip(lines, pair, strict=True)],
            height=HEIGHT,
            hovermode="x unified",
            xaxis=layer_axis(layers),
            yaxis=axis(range=[0, top], tickformat="~g", nticks=5),
        )
        note = f"last layer: {_last(pair[0])} as merged (grey), {_last(pair[1])} refitted"
        charts.append(Chart(f"refit-drift-{at}", short(name, TITLE), note, drawn, HEIGHT))
    return tuple(charts)


def _last(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return plain(known[-1]) if known else "unknown"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
