"""The calibration that the model went through: how its solves converged, and what they gained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moemerge.report.page.plots import (
    Chart,
    Group,
    Line,
    axis,
    ceiling,
    figure,
    go,
    layer_axis,
    safe,
    trace_of,
)
from moemerge.report.page.reading import Reading, Row, mean, number, plain, rounded

HEIGHT = 250
CONVERGED = "converged"
# A curve on a screen shows no more points than this.
POINTS = 160


def solver(reading: Reading) -> Group | None:
    """Residuals step by step, steps a layer, divergence before and after."""
    rows = [row for row in reading.calibration.get("layers") or [] if "layer" in row]
    if not rows:
        return None
    rows.sort(key=lambda row: int(row["layer"]))
    charts = [
        _residuals(rows, number((reading.calibration.get("settings") or {}).get("rtol"))),
        _steps(rows),
        _gain(rows),
    ]
    return Group("solver", tuple(charts), columns=3)


def _residuals(rows: Sequence[Row], rtol: float | None) -> Chart:
    curves = {int(row["layer"]): _history(row) for row in rows}
    slowest = max(curves, key=lambda layer: len(curves[layer]))
    # The slowest is drawn last, on top of the others.
    order = [layer for layer in curves if layer != slowest] + [slowest]
    traces = [_curve(layer, curves[layer], layer == slowest) for layer in order]
    shapes: list[dict[str, Any]] = []
    if rtol:
        line = {"color": "var(--lost)", "width": 1.5, "dash": "dash"}
        shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": rtol, "y1": rtol}]
        shapes[0]["line"] = line
    seen = [value for curve in curves.values() for _, value in curve] + ([rtol] if rtol else [])
    ends = [math.floor(math.log10(min(seen, default=1.0))), math.log10(2 * max(seen, default=1.0))]
    drawn = figure(
        traces,
        height=HEIGHT,
        hovermode="closest",
        shapes=shapes,
        xaxis=axis("CG step", rangemode="tozero", showgrid=False, nticks=6),
        yaxis=axis(
            type="log",
            range=ends,
            dtick=max(1, round((ends[1] - ends[0]) / 4)),
            exponentformat="power",
            showexponent="all",
        ),
    )
    told = any(len(curve) > 1 for curve in curves.values())
    note = f"a line for each layer; the slowest, layer {slowest}, stands out"
    if not told:
        note = "the residual at the end of each layer's solve"
    return Chart("residuals", "Relative residual", note + _tolerance(rtol), drawn, HEIGHT)


def _tolerance(rtol: float | None) -> str:
    return f"; dashed: the tolerance, {plain(rtol, 1)}" if rtol else ""


def _history(row: Row) -> list[tuple[int, float]]:
    """(step, residual) of a solve: its whole history, or its end where only that is told."""
    values = [number(value) for value in row.get("residuals") or []]
    points = [(i, v) for i, v in enumerate(values) if v is not None and v > 0]
    if not points:
        last = number(row.get("residual"))
        points = [(int(row.get("iterations") or 0), last)] if last else []
    every = max(1, math.ceil(len(points) / POINTS))
    kept = points[::every]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _curve(layer: int, curve: list[tuple[int, float]], stands_out: bool) -> Any:
    return go.Scatter(
        x=[step for step, _ in curve],
        y=[rounded(value) for _, value in curve],
        mode="lines" if len(curve) > 1 else "markers",
        line={
            "color": "var(--accent)" if stands_out else "var(--other)",
            "width": 2.5 if stands_out else 1.2,
        },
        marker={"color": "var(--accent)" if stands_out else "var(--other)", "size": 7},
        opacity=1.0 if stands_out else 0.55,
        name=f"layer {layer}",
        hovertemplate=f"Layer {layer}, step %{{x}}: %{{y:.2e}}<extra></extra>",
    )


def _steps(rows: Sequence[Row]) -> Chart:
    layers = [int(row["layer"]) for row in rows]
    done = [row.get("status") == CONVERGED for row in rows]
    steps = [int(row.get("iterations") or 0) for row in rows]
    trace = go.Bar(
        x=layers,
        y=steps,
        customdata=[safe(str(row.get("status", "")).replace("_", " ")) for row in rows],
        marker={"color": ["var(--accent)" if ok else "var(--lost)" for ok in done]},
        hovertemplate="Layer %{x}: %{y} steps, %{customdata}<extra></extra>",
    )
    drawn = figure(
        [trace],
        height=HEIGHT,
        bargap=0.25,
        xaxis=layer_axis(layers),
        yaxis=axis(range=[0, ceiling([float(s) for s in steps], 1.0)], nticks=5),
    )
    failed = [str(layer) for layer, ok in zip(layers, done, strict=True) if not ok]
    note = f"{sum(steps)} in all; every layer converged"
    if failed:
        note = f"{sum(steps)} in all; not converged: layer {', '.join(failed)}"
    return Chart("steps", "CG steps", note, drawn, HEIGHT)


def _gain(rows: Sequence[Row]) -> Chart:
    layers = [int(row["layer"]) for row in rows]
    before, after = ([_mean_of(row.get(key)) for row in rows] for key in ("kl_before", "kl_after"))
    lines = (Line("before", "var(--other)", "solid"), Line("after", "var(--accent)", "solid", 2.5))
    drawn = figure(
        [
            trace_of(line, layers, values, ".3~g")
            for line, values in zip(lines, (before, after), strict=True)
        ],
        height=HEIGHT,
        hovermode="x unified",
        xaxis=layer_axis(layers),
        yaxis=axis(range=[0, ceiling(before + after, 1e-3)], tickformat="~g", nticks=5),
    )
    note = f"mean {plain(mean(before))} before (grey), {plain(mean(after))} after (colour)"
    return Chart("gain", "KL on the calibration text", note, drawn, HEIGHT)


def _mean_of(by_domain: Any) -> float | None:
    if not isinstance(by_domain, Mapping):
        return rounded(number(by_domain))
    return rounded(mean(number(value) for value in by_domain.values()))
