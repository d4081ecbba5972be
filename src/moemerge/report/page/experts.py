"""Charts over the experts: their loads, and which lost tokens to which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from moemerge.report.page.plots import (
    Chart,
    Choice,
    DiagnosisRow,
    Group,
    Reading,
    View,
    axis,
    go,
    plot,
)
from moemerge.runtime.formatting import layers_in_words, number, percent, short

# A Sankey diagram with more links is unreadable.
LINKS = 24
# The quantile of loads that gets the heat maps' darkest colour.
COLOUR_QUANTILE = 0.995
LOWEST_TOP, LOWEST_REACH = 2.0, 0.1
# Gaps between tiles are drawn only if the tiles are large enough.
GAP_EXPERTS, GAP_LAYERS = 64, 32
# With more loads than this, one decimal is used: the page would exceed six megabytes.
MANY_LOADS = 500_000
HEIGHTS = (200, 430)
ROW_HEIGHT = 11
FLOW_HEIGHT = 460
OPTION = 48
Grid = list[list[float | None]]


def loads(reading: Reading) -> Group:
    """Return three heat maps of layers by experts: source's load, model's load, difference."""
    models, domains = reading.models, reading.domains
    many = sum(len(row.get("load") or []) for row in reading.layers) > MANY_LOADS
    digits = 1 if many else 2
    arrays: dict[str, Grid] = {}
    changes: list[Grid] = []
    for d, domain in enumerate(domains):
        rows = reading.rows(models[0], domain)
        arrays[f"source{d}"] = source = [_fair_shares(row, "load_source", digits) for row in rows]
        for m, model in enumerate(models):
            grid = [_fair_shares(row, "load", digits) for row in reading.rows(model, domain)]
            arrays[f"model{m},{d}"] = grid
            changes.append(_difference(grid, source))
    layers = [int(row["layer"]) for row in reading.rows(models[0], domains[0])]
    experts = max(len(row) for grid in arrays.values() for row in grid)
    top, reach = _top(list(arrays.values()), LOWEST_TOP), _top(changes, LOWEST_REACH)
    charts = []
    for role, title in (("source", "Source"), ("model", "Model"), ("change", "Difference")):
        views = {}
        for (d, domain), m in product(enumerate(domains), range(len(models))):
            of_source, of_model = f"@source{d}", f"@model{m},{d}"
            change = f"{of_model}-{of_source}"
            shown = {"source": of_source, "model": of_model, "change": change}[role]
            note = _load_note(reading, role, m, domain)
            # As categories: dense layers between would leave empty stripes.
            data = ({"z": shown, "y": [str(layer) for layer in layers]},)
            views[view_key(reading, d, m)] = View(note, data)
        drawn = _heat_map(len(layers), experts, role, top, reach)
        first = views[view_key(reading, 0, 0)].note
        charts.append(Chart(f"load-{role}", title, first, drawn, views))
    # All three use the same arrays, which the first contains.
    charts[0] = replace(charts[0], arrays=arrays)
    return Group("load", tuple(charts), choices=choices_of(reading), columns=3)


def choices_of(reading: Reading) -> tuple[Choice, ...]:
    """Return selects for dimensions with more than one option."""
    choices = []
    if len(reading.domains) > 1:
        choices.append(Choice("Domain", tuple(short(d, OPTION) for d in reading.domains)))
    if len(reading.models) > 1:
        names = tuple(short(name, OPTION) for name in reading.names.values())
        choices.append(Choice("Model", names))
    return tuple(choices)


def view_key(reading: Reading, domain: int, model: int, *more: int) -> str:
    """Return a view's key: the option numbers of the selects that exist."""
    given = [domain] * (len(reading.domains) > 1) + [model] * (len(reading.models) > 1)
    return ",".join(str(n) for n in [*given, *more])


def _fair_shares(row: DiagnosisRow, key: str, digits: int) -> list[float | None]:
    """Return loads as multiples of an equal share."""
    load: Sequence[Any] = row.get(key) or []
    values = [number(value) for value in load]
    return [None if value is None else round(value * len(values), digits) for value in values]


def _difference(grid: Grid, source: Grid) -> Grid:
    return [
        [
            None if a is None or b is None else round(a - b, 2)
            for a, b in zip(mine, theirs, strict=False)
        ]
        for mine, theirs in zip(grid, source, strict=False)
    ]


def _top(grids: Sequence[Grid], floor: float) -> float:
    """Return the end of the colour scale: a quantile, so that one expert does not dominate."""
    sizes = sorted(abs(v) for grid in grids for row in grid for v in row if v is not None)
    if not sizes:
        return floor
    reached = sizes[min(len(sizes) - 1, math.floor(COLOUR_QUANTILE * len(sizes)))]
    return max(floor, round(reached, 1))


def _heat_map(layers: int, experts: int, role: str, top: float, reach: float) -> Any:
    """Layers run downwards, experts to the right; gaps between tiles if there is space."""
    change = role == "change"
    stops = ("lost", "level", "gained") if change else ("heat-0", "heat-1", "heat-2", "heat-3")
    steps = len(stops) - 1
    trace = go.Heatmap(
        zmin=-reach if change else 0,
        zmax=reach if change else top,
        colorscale=[[i / steps, f"var(--{name})"] for i, name in enumerate(stops)],
        xgap=0.6 if experts <= GAP_EXPERTS else 0,
        ygap=0.6 if layers <= GAP_LAYERS else 0,
        hovertemplate="Layer %{y}, expert %{x}<br>"
        + ("%{z:+.2f}" if change else "%{z:.2f}")
        + " × an equal share<extra></extra>",
        colorbar={
            "orientation": "h",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "x": 0.5,
            "len": 0.9,
            "thickness": 8,
            "outlinewidth": 0,
            "ticks": "",
            "tickangle": 0,
            "tickvals": [-reach, 0, reach] if change else [0, 1, top],
            "ticktext": [f"−{reach:g}", "same", f"+{reach:g}"]
            if change
            else ["0", "1", f"{top:g}"],
            "tickfont": {"size": 11},
            "title": {
                "text": f"{'change of ' * change}load, 1 is an equal share",
                "side": "bottom",
                "font": {"size": 11},
            },
        },
    )
    return plot(
        [trace],
        height=min(max(HEIGHTS[0], 124 + ROW_HEIGHT * layers), HEIGHTS[1]),
        margin={"l": 34, "r": 6, "t": 6, "b": 92},
        xaxis=axis("Expert", showgrid=False, nticks=8, tickformat="d"),
        yaxis=axis(
            showgrid=False, autorange="reversed", nticks=10, type="category", automargin=False
        ),
    )


def _load_note(reading: Reading, role: str, model: int, domain: str) -> str:
    rows = reading.rows(reading.models[model], domain)
    if role == "source":
        return f"{short(reading.source_label(domain))} on its own text"
    if role == "model":
        return f"{short(reading.names[reading.models[model]])} on the same text"
    dead = sum(len(row.get("dead") or []) for row in rows)
    crowded = [int(row["layer"]) for row in rows if row.get("overloaded")]
    words = f"{dead or 'no'} expert{'s' if dead > 1 else ''} went idle"
    return f"{words}; overloaded ones in {layers_in_words(crowded)}" if crowded else words


def flows(reading: Reading) -> Group:
    """Return a diagram of which experts lost tokens to which, per layer; the worst layer first."""
    models, domains = reading.models, reading.domains
    layers = sorted({int(row["layer"]) for row in reading.layers})
    worst = reading.worst
    start = (domains.index(str(worst["domain"])), layers.index(int(worst["layer"])))
    views: dict[str, View] = {}
    for (d, domain), (m, model) in product(enumerate(domains), enumerate(models)):
        by_layer = {int(row["layer"]): row for row in reading.rows(model, domain)}
        for i, layer in enumerate(layers):
            views[view_key(reading, d, m, i)] = _flow_view(by_layer.get(layer))
    choices = [
        Choice(c.label, c.options, start[0] if c.label == "Domain" else 0)
        for c in choices_of(reading)
    ]
    choices.append(Choice("Layer", tuple(str(layer) for layer in layers), start[1]))
    first = views[view_key(reading, start[0], 0, start[1])]
    drawn = plot([_sankey()], height=FLOW_HEIGHT, margin={"l": 8, "r": 8, "t": 12, "b": 12})
    chart = Chart("flow", "Lost by → taken by", first.note, drawn, views)
    return Group("flow", (chart,), choices=tuple(choices))


def _sankey() -> Any:
    return go.Sankey(
        arrangement="fixed",
        node={
            "pad": 9,
            "thickness": 12,
            "line": {"width": 0},
            "hovertemplate": "%{label}: %{value:.2%} of all choices<extra></extra>",
        },
        link={
            "color": "var(--link)",
            "hovercolor": "var(--link-strong)",
            "hovertemplate": "from %{source.label} to %{target.label}"
            "<br>%{value:.2%} of all choices<extra></extra>",
        },
        textfont={"size": 12, "color": "var(--ink)", "shadow": "none"},
        valueformat=".2%",
    )


def _flow_view(row: DiagnosisRow | None) -> View:
    if row is None:
        return View("There is no router in this layer.")
    flow = [(int(a), int(b), float(share)) for a, b, share in row.get("flow") or []]
    links = sorted(flow, key=lambda link: -link[2])[:LINKS]
    mismatch = number(row.get("mismatch"))
    if not links:
        return View("No choice moved from one expert to another here.")
    losers = list(dict.fromkeys(a for a, _, _ in links))
    takers = list(dict.fromkeys(b for _, b, _ in links))
    shown = math.fsum(share for _, _, share in links)
    note = f"Layer {row['layer']}: {percent(mismatch)} of the choices moved"
    if mismatch:
        note += (
            f"; the {len(links)} largest flows are drawn, "
            f"{percent(min(1.0, shown / mismatch))} of what moved"
        )
    change = {
        "node": {
            "label": [f"expert {e}" for e in losers + takers],
            "color": ["var(--lost)"] * len(losers) + ["var(--gained)"] * len(takers),
        },
        "link": {
            "source": [losers.index(a) for a, _, _ in links],
            "target": [len(losers) + takers.index(b) for _, b, _ in links],
            "value": [float(f"{share:.4g}") for _, _, share in links],
        },
    }
    return View(note + ".", (change,))
