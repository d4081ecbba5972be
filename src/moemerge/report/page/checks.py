"""Charts that check a calibration: does its quadratic model hold, did the solver converge?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from moemerge.report.page.experts import choices_of, view_key
from moemerge.report.page.plots import (
    Chart,
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
    layer_axis,
    lines_of,
    log_ticks,
    over_layers,
    plot,
    rounded,
    safe,
    series,
    tag,
    trace_of,
)
from moemerge.runtime.formatting import known_mean, number, percent, plain, short

HEIGHT = 260
# The paper's bounds for the relative logit shift.
BANDS = ("below 0.1", "0.1 to 0.2", "above 0.2")


def checks(reading: Reading) -> tuple[Group, Group]:
    """Return charts of one model's logit shifts, and of the quadratic model's fit."""
    shifts = Group("shift", (_shifts(reading),), choices=choices_of(reading))
    lines = tuple(lines_of(reading).values())
    return shifts, Group("quadratic", (_quadratic(reading),), lines=lines)


def _shifts(reading: Reading) -> Chart:
    """Return the share of tokens with a small, moderate and large logit shift."""
    pairs = product(enumerate(reading.domains), enumerate(reading.models))
    views = {
        view_key(reading, d, m): _shift_view(reading, model, domain)
        for (d, domain), (m, model) in pairs
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
    drawn = plot(
        traces,
        height=HEIGHT,
        barmode="stack",
        bargap=0.18,
        hovermode="x unified",
        showlegend=True,
        margin={"l": 38, "r": 10, "t": 30, "b": 38},
        xaxis=layer_axis(layers),
        yaxis=axis(range=[0, 1], tickformat=".0%", nticks=5),
    )
    first = views[view_key(reading, 0, 0)]
    return Chart("shift", "Tokens by relative logit shift", first.note, drawn, views)


def _shift_view(reading: Reading, model: str, domain: str) -> View:
    rows = reading.rows(model, domain)
    layers = [int(row["layer"]) for row in rows]
    small, moderate = series(rows, "shift_small"), series(rows, "shift_moderate")
    parts = [_bands(a, b) for a, b in zip(small, moderate, strict=True)]
    note = (
        f"{percent(known_mean(small))} of the tokens below 0.1 and "
        f"{percent(known_mean(moderate))} below 0.2 in the mean over the layers; "
        f"mean shift {plain(known_mean(series(rows, 'logit_shift')))}"
    )
    return View(
        note, tuple({"x": layers, "y": [part[i] for part in parts]} for i in range(len(BANDS)))
    )


def _bands(small: float | None, moderate: float | None) -> tuple[float | None, ...]:
    """Return the shares of the three bands, from the shares below each bound."""
    if small is None or moderate is None:
        return (None, None, None)
    return (small, round(max(0.0, moderate - small), 4), round(max(0.0, 1.0 - moderate), 4))


def _quadratic(reading: Reading) -> Chart:
    """Return a scatter plot of the quadratic model against the KL itself, one dot per router."""
    traces: list[Any] = []
    sizes: list[float] = []
    lines = lines_of(reading)
    for model in emphasised_last(reading):
        points, line = _points(reading, model), lines[model]
        sizes += [v for kl, quadratic, _ in points for v in (kl, quadratic)]
        traces.append(
            go.Scatter(
                x=[p[0] for p in points],
                y=[p[1] for p in points],
                customdata=[p[2] for p in points],
                mode="markers",
                name=tag(line.label),
                marker={"color": line.colour, "symbol": line.symbol, "size": 7, "opacity": 0.75},
                hovertemplate="%{customdata}<br>KL %{x:.3~g}, quadratic %{y:.3~g}<br>"
                f"{tag(line.label)}<extra></extra>",
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
    drawn = plot(
        [diagonal, *traces],
        height=HEIGHT,
        hovermode="closest",
        xaxis=axis("KL divergence", type="log", range=scale, **log_ticks(scale)),
        yaxis=axis("Quadratic", type="log", range=scale, **log_ticks(scale)),
    )
    return Chart("quadratic", "Quadratic model against KL", _fit(reading), drawn)


def _points(reading: Reading, model: str) -> list[tuple[float, float, str]]:
    """Return the points of a model that a logarithmic axis can show."""
    points = []
    for row in reading.layers:
        kl, quadratic = number(row.get("kl_on_features")), number(row.get("quadratic"))
        if row["model"] == model and kl and quadratic and kl > 0 and quadratic > 0:
            where = f"layer {row['layer']}, {short(str(row['domain']))}"
            points.append((float(f"{kl:.4g}"), float(f"{quadratic:.4g}"), safe(where)))
    return points


def _fit(reading: Reading) -> str:
    points = _points(reading, reading.models[0])
    if not points:
        return "both are zero everywhere: the routers agree"
    ratios = sorted(quadratic / kl for kl, quadratic, _ in points)
    name, median = short(reading.names[reading.models[0]]), plain(ratios[len(ratios) // 2])
    return (
        "both routers on the model's features; on the dashed line the two are equal; "
        f"median ratio of {name} {median}"
    )


# --- the calibration that a model went through --------------------------------------------------

CONVERGED = "converged"
# A curve on a screen shows no more points than this.
POINTS = 160


def solver(reading: Reading) -> Group | None:
    """Return charts of residuals, steps per layer, and KL before and after."""
    rows = sorted(reading.calibration.get("layers", ()), key=lambda row: int(row["layer"]))
    if not rows:
        return None
    rtol = number((reading.calibration.get("settings") or {}).get("rtol"))
    colour = colour_of(reading, reading.calibrated)
    charts = (_residuals(rows, rtol, colour), _steps(rows, colour), _gain(rows, colour))
    return Group("solver", charts, columns=3)


def _residuals(rows: Sequence[DiagnosisRow], rtol: float | None, colour: str) -> Chart:
    curves = {int(row["layer"]): _history(row) for row in rows}
    slowest = max(curves, key=lambda layer: len(curves[layer]))
    # The slowest is drawn last, on top.
    order = [layer for layer in curves if layer != slowest] + [slowest]
    traces = [_curve(layer, curves[layer], colour, layer == slowest) for layer in order]
    shapes: list[dict[str, Any]] = []
    if rtol:
        line = {"color": "var(--line-strong)", "width": 1.5, "dash": "dash"}
        shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": rtol, "y1": rtol}]
        shapes[0]["line"] = line
    seen = [value for curve in curves.values() for _, value in curve] + ([rtol] if rtol else [])
    ends = [math.floor(math.log10(min(seen, default=1.0))), math.log10(2 * max(seen, default=1.0))]
    drawn = plot(
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
    note = "the residual at the end of each layer's solve"
    if any(len(curve) > 1 for curve in curves.values()):
        note = f"a line for each layer; the slowest, layer {slowest}, stands out"
    if rtol:
        note += f"; dashed: the tolerance, {plain(rtol, 1)}"
    return Chart("residuals", "Relative residual", note, drawn)


def _history(row: DiagnosisRow) -> list[tuple[int, float]]:
    """Return (step, residual) of a solve: its whole history, or its end if only that is known."""
    values = [number(value) for value in row.get("residuals") or []]
    points = [(i, v) for i, v in enumerate(values) if v is not None and v > 0]
    if not points:
        last = number(row.get("residual"))
        points = [(int(row.get("iterations") or 0), last)] if last else []
    every = max(1, math.ceil(len(points) / POINTS))
    kept = points[::every]
    return kept if not points or kept[-1] == points[-1] else [*kept, points[-1]]


def _curve(layer: int, curve: list[tuple[int, float]], colour: str, stands_out: bool) -> Any:
    colour = colour if stands_out else "var(--other)"
    return go.Scatter(
        x=[step for step, _ in curve],
        y=[rounded(value) for _, value in curve],
        mode="lines" if len(curve) > 1 else "markers",
        line={"color": colour, "width": 2.5 if stands_out else 1.2},
        marker={"color": colour, "size": 7},
        opacity=1.0 if stands_out else 0.55,
        name=f"layer {layer}",
        hovertemplate=f"Layer {layer}, step %{{x}}: %{{y:.2e}}<extra></extra>",
    )


def _steps(rows: Sequence[DiagnosisRow], colour: str) -> Chart:
    layers = [int(row["layer"]) for row in rows]
    done = [row.get("status") == CONVERGED for row in rows]
    steps = [int(row.get("iterations") or 0) for row in rows]
    trace = go.Bar(
        x=layers,
        y=steps,
        customdata=[safe(str(row.get("status", "")).replace("_", " ")) for row in rows],
        marker={"color": [colour if ok else "var(--lost)" for ok in done]},
        hovertemplate="Layer %{x}: %{y} steps, %{customdata}<extra></extra>",
    )
    drawn = plot(
        [trace],
        height=HEIGHT,
        bargap=0.25,
        xaxis=layer_axis(layers),
        yaxis=axis(range=[0, ceiling([float(s) for s in steps], 1.0)], nticks=5),
    )
    failed = [str(layer) for layer, ok in zip(layers, done, strict=True) if not ok]
    note = f"{sum(steps)} in all; every layer converged"
    if failed:
        note = f"{sum(steps)} in all; not converged (orange): layer {', '.join(failed)}"
    return Chart("steps", "CG steps", note, drawn)


def _gain(rows: Sequence[DiagnosisRow], colour: str) -> Chart:
    layers = [int(row["layer"]) for row in rows]
    before, after = (
        [rounded(known_mean(map(number, row.get(key, {}).values()))) for row in rows]
        for key in ("kl_before", "kl_after")
    )
    lines = (Line("before", "var(--other)"), Line("after", colour, width=2.5))
    values = zip(lines, (before, after), strict=True)
    traces = [trace_of(line, layers, own, ".3~g") for line, own in values]
    drawn = over_layers(traces, layers, ceiling(before + after, 1e-3), height=HEIGHT)
    note = (
        f"mean {plain(known_mean(before))} before (grey), {plain(known_mean(after))} after (colour)"
    )
    return Chart("gain", "KL on the calibration text", note, drawn)
