"""Is the theory's premise met: how far the logits moved, and whether the quadratic model holds."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from moemerge.report.page.charts_experts import choices_of, view_key
from moemerge.report.page.plots import (
    Chart,
    Group,
    View,
    axis,
    figure,
    go,
    layer_axis,
    line_of,
    log_ticks,
    safe,
    tag,
)
from moemerge.report.page.reading import Reading, mean, number, percent, plain, series
from moemerge.report.words import short

HEIGHT = 260
# The paper's bounds for the relative shift of the logits.
BANDS = ("below 0.1", "0.1 to 0.2", "above 0.2")


def checks(reading: Reading) -> Group:
    """Both checks side by side; the choices are those of the first."""
    charts = (_shifts(reading), _quadratic(reading))
    return Group("checks", charts, choices=choices_of(reading), columns=2)


def _shifts(reading: Reading) -> Chart:
    """The share of tokens whose logits moved little, some, much: three bands that add up to 1."""
    views = {
        view_key(reading, d, m): _shift_view(reading, model, domain)
        for (d, domain), (m, model) in product(
            enumerate(reading.domains), enumerate(reading.models)
        )
    }
    traces = [
        go.Bar(
            name=band,
            marker={"color": f"var(--band-{i})", "line": {"width": 0}},
            hovertemplate=f"%{{y:.1%}}<extra>{band}</extra>",
        )
        for i, band in enumerate(BANDS)
    ]
    layers = sorted({int(row["layer"]) for row in reading.layers})
    drawn = figure(
        traces,
        height=HEIGHT,
        barmode="stack",
        bargap=0.18,
        hovermode="x unified",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        margin={"l": 38, "r": 10, "t": 30, "b": 38},
        xaxis=layer_axis(layers),
        yaxis=axis(range=[0, 1], tickformat=".0%", nticks=5),
    )
    first = views[view_key(reading, 0, 0)]
    return Chart("shift", "Tokens by relative logit shift", first.note, drawn, HEIGHT, views)


def _shift_view(reading: Reading, model: str, domain: str) -> View:
    rows = reading.rows(model, domain)
    layers = [int(row["layer"]) for row in rows]
    small, moderate = series(rows, "shift_small"), series(rows, "shift_moderate")
    parts = [_bands(a, b) for a, b in zip(small, moderate, strict=True)]
    note = (
        f"{percent(mean(small))} of the tokens below 0.1 and {percent(mean(moderate))} below 0.2 "
        f"in the mean over the layers; mean shift {plain(mean(series(rows, 'logit_shift')))}"
    )
    return View(
        note, tuple({"x": layers, "y": [part[i] for part in parts]} for i in range(len(BANDS)))
    )


def _bands(small: float | None, moderate: float | None) -> tuple[float | None, ...]:
    """The shares of the three bands, from the shares below each bound."""
    if small is None or moderate is None:
        return (None, None, None)
    return (small, round(max(0.0, moderate - small), 4), round(max(0.0, 1.0 - moderate), 4))


def _quadratic(reading: Reading) -> Chart:
    """The second-order model of the divergence against the divergence itself, a dot a router."""
    traces: list[Any] = []
    sizes: list[float] = []
    for i, (model, label) in reversed(list(enumerate(reading.names.items()))):
        points = _points(reading, model)
        sizes += [v for kl, quad, _ in points for v in (kl, quad)]
        line = line_of(i, label)
        traces.append(
            go.Scatter(
                x=[p[0] for p in points],
                y=[p[1] for p in points],
                customdata=[p[2] for p in points],
                mode="markers",
                name=tag(label),
                marker={
                    "color": line.colour,
                    "size": 7,
                    "opacity": 0.75,
                    "symbol": "circle" if i == 0 else "diamond-open",
                },
                hovertemplate="%{customdata}<br>KL %{x:.3~g}, quadratic %{y:.3~g}<br>"
                f"{tag(label)}<extra></extra>",
            )
        )
    low, high = (min(sizes), max(sizes)) if sizes else (1e-3, 1.0)
    ends = [low / 1.5, high * 1.5]
    diagonal = go.Scatter(
        x=ends,
        y=ends,
        mode="lines",
        line={"color": "var(--line-strong)", "dash": "dash", "width": 1.5},
        hoverinfo="skip",
    )
    scale = [math.log10(end) for end in ends]
    drawn = figure(
        [diagonal, *traces],
        height=HEIGHT,
        hovermode="closest",
        xaxis=axis("KL divergence", type="log", range=scale, **log_ticks(scale)),
        yaxis=axis("Quadratic", type="log", range=scale, **log_ticks(scale)),
    )
    return Chart("quadratic", "Quadratic model against KL", _fit(reading), drawn, HEIGHT)


def _points(reading: Reading, model: str) -> list[tuple[float, float, str]]:
    """Those of a model that a logarithmic axis can show."""
    found = []
    for row in reading.layers:
        kl, quad = number(row.get("kl_on_features")), number(row.get("quadratic"))
        if row["model"] == model and kl and quad and kl > 0 and quad > 0:
            where = f"layer {row['layer']}, {short(str(row['domain']))}"
            found.append((float(f"{kl:.4g}"), float(f"{quad:.4g}"), safe(where)))
    return found


def _fit(reading: Reading) -> str:
    points = _points(reading, reading.models[0])
    if not points:
        return "both are zero everywhere: the routers agree"
    ratios = sorted(quad / kl for kl, quad, _ in points)
    middle = ratios[len(ratios) // 2]
    return (
        f"both routers on the model's features; on the dashed line the two are equal; "
        f"median ratio {plain(middle)}"
    )
