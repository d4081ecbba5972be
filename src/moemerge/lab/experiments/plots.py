"""Draw the figures of a study. matplotlib is imported only when a figure is drawn."""

from __future__ import annotations

import importlib.util
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moemerge.errors import UsageError
from moemerge.lab.evaluation.significance import Mean
from moemerge.lab.experiments.summary import RowSummary, Summary
from moemerge.lab.experiments.tables import (
    AS_MERGED,
    AVERAGED,
    EXACT,
    HARC,
    REFERENCE,
    REFIT,
    REFIT_BASE,
    SOURCE,
    TUNED,
)
from moemerge.runtime.files import write_whole

# Distinguishable in print and to colour-blind readers (Okabe and Ito's palette).
COLOURS = {
    AS_MERGED: "#999999",
    AVERAGED: "#e69f00",
    HARC: "#0072b2",
    SOURCE: "#009e73",
    EXACT: "#56b4e9",
    TUNED: "#f0e442",
    REFIT: "#d55e00",
    REFIT_BASE: "#cc79a7",
}
OTHERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
DPI = 150


def require_matplotlib() -> None:
    """Refuse before any work if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "figures need matplotlib, which is not installed",
            hint="pip install 'moemerge[report]', or leave them out with `figures=False`",
        )


def draw_figure(summary: Summary, path: Path) -> list[Path]:
    """Write `path`.png and `path`.svg."""
    import matplotlib

    matplotlib.use("Agg")  # files only: no window, no display needed
    from matplotlib import pyplot

    # Without a date and with fixed ids, the same numbers produce the same file.
    with pyplot.rc_context({"svg.hashsalt": "moemerge", "font.size": 9, "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
        KINDS[summary.form.figure](summary, axes)
        axes.spines[["top", "right"]].set_visible(False)
        files = [
            _save(figure, path.with_suffix(".png"), dpi=DPI),
            _save(figure, path.with_suffix(".svg"), metadata={"Date": None}),
        ]
        pyplot.close(figure)
    return files


def _save(figure: Any, path: Path, **options: Any) -> Path:
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.removeprefix("."), **options)
    write_whole(path, data.getvalue())
    return path


def _groups(summary: Summary, axes: Any) -> None:
    """Draw bars of the variants, method by method, and lines for the bounds."""
    groups = {name: rows for name, rows in summary.groups.items() if name != REFERENCE}
    colours = _colours(summary)
    labels = [label for label in colours if any(summary.row(g, label) for g in groups)]
    width = 0.8 / max(1, len(labels))
    for number, label in enumerate(labels):
        rows = [(at, summary.row(group, label)) for at, group in enumerate(groups)]
        known = [(at, row) for at, row in rows if row is not None]
        places = [at + (number - (len(labels) - 1) / 2) * width for at, _ in known]
        _bars(axes, places, [row.overall for _, row in known], width, colours[label], label)
    for row in summary.groups.get(REFERENCE, []):
        axes.axhline(100 * row.overall.value, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(
            row.label, (1, 100 * row.overall.value), xycoords=("axes fraction", "data"),
            ha="right", va="bottom", fontsize=7,
        )  # fmt: skip
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel("accuracy, %")
    highest = max(100 * row.overall.value for row in summary.rows)
    axes.set_ylim(0, max(1.0, 1.3 * highest))  # space for the legend
    axes.legend(frameon=False, ncols=3, fontsize=7, loc="upper left")


def _colours(summary: Summary) -> dict[str, str]:
    """Return the colours of the variants: the known ones, or in a study all."""
    if summary.form.paired_by == "seeds":
        return COLOURS
    groups = [rows for name, rows in summary.groups.items() if name != REFERENCE]
    # In the order of the largest group: a plain average, for instance, has no averaged-router
    # control.
    groups.sort(key=len, reverse=True)
    labels = dict.fromkeys(row.label for rows in groups for row in rows)
    free = itertools.cycle(c for c in OTHERS if c not in {COLOURS.get(label) for label in labels})
    return {label: COLOURS.get(label) or next(free) for label in labels}


def _plain_bars(summary: Summary, axes: Any) -> None:
    """Draw one bar per row."""
    rows = summary.rows
    starts = {group: rows.index(own[0]) for group, own in summary.groups.items()}
    colours = [COLOURS.get(row.label, OTHERS[0]) for row in rows]
    colours = [COLOURS[AS_MERGED] if n in starts.values() else c for n, c in enumerate(colours)]
    _bars(axes, range(len(rows)), [row.overall for row in rows], 0.7, colours, None)
    axes.set_xticks(range(len(rows)), [r.label.replace(", ", ",\n") for r in rows], fontsize=7)
    if len(starts) > 1:
        for group, at in starts.items():
            axes.annotate(group, (at - 0.35, 1), xycoords=("data", "axes fraction"), va="bottom")
    axes.set_ylabel("accuracy, %")


def _swap(summary: Summary, axes: Any) -> None:
    """Draw Figure 1 of the paper: each domain's accuracy with swapped routers."""
    domains = summary.form.domains
    width = 0.8 / len(summary.rows)
    for number, row in enumerate(summary.rows):
        places = [at + (number - (len(summary.rows) - 1) / 2) * width for at in range(len(domains))]
        values = [row.accuracy[domain] for domain in domains]
        _bars(axes, places, values, width, OTHERS[number % len(OTHERS)], row.label)
    axes.set_xticks(range(len(domains)), domains)
    axes.set_ylabel("accuracy, %")
    axes.legend(frameon=False, fontsize=7)


def _lines(summary: Summary, axes: Any) -> None:
    """Draw accuracy along a sweep; the plain merge is a dashed line."""
    for number, (group, rows) in enumerate(summary.groups.items()):
        colour = OTHERS[number]
        series = _series(group, [row for row in rows if row.x is not None])
        for name, curve in series.items():
            values = [row.overall for row in curve]
            errors = _errors(values)
            axes.errorbar(
                [row.x for row in curve], [100 * v.value for v in values], errors,
                marker="o", markersize=3, capsize=2, label=name, color=colour,
            )  # fmt: skip
            colour = OTHERS[(number + len(summary.groups)) % len(OTHERS)]
        axes.axhline(100 * rows[0].overall.value, color=OTHERS[number], linestyle="--", lw=0.8)
    places = [row.x for row in summary.rows if row.x is not None]
    axes.locator_params(axis="x", integer=all(float(x).is_integer() for x in places))
    axes.set_xlabel(summary.form.axis)
    axes.set_ylabel("accuracy, %")
    axes.legend(frameon=False, fontsize=7)


def _series(group: str, rows: Sequence[RowSummary]) -> dict[str, list[RowSummary]]:
    """Return the rows of each curve: a whole group, or labels with the same first letter."""
    curves: dict[str, list[RowSummary]] = {}
    for row in rows:
        letter = row.label[0] if row.label[0] in "αγ" else ""
        curves.setdefault(f"{group} {letter}".strip(), []).append(row)
    return curves


def _layers(summary: Summary, axes: Any) -> None:
    """Draw the KL of each layer, averaged over domains."""
    for row in summary.rows:
        # A domain without a source has no routing to compare with.
        layers = list(zip(*filter(None, row.kl_layers.values()), strict=True))
        values = [sum(layer) / len(layer) for layer in layers]
        axes.plot(range(len(values)), values, marker="o", markersize=3, label=row.label,
                  color=COLOURS.get(row.label))  # fmt: skip
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("KL to the specialist's routing")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)


def _bars(
    axes: Any,
    places: Sequence[float],
    values: Sequence[Mean],
    width: float,
    colour: Any,
    label: Any,
) -> None:
    heights = [100 * value.value for value in values]
    errors = _errors(values)
    axes.bar(places, heights, width * 0.95, yerr=errors, color=colour, label=label,
             error_kw={"linewidth": 0.8}, capsize=1.5)  # fmt: skip


def _errors(values: Sequence[Mean]) -> list[float] | None:
    """Return standard errors in percent; a single seed has none."""
    if any(value.error is None for value in values):
        return None
    return [100 * (value.error or 0.0) for value in values]


KINDS: dict[str, Callable[[Summary, Any], None]] = {
    "groups": _groups,
    "bars": _plain_bars,
    "swap": _swap,
    "lines": _lines,
    "layers": _layers,
}
