"""The pages of an evaluation and of a study: one HTML file each, which loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from moemerge.report.files import compressed, save_page
from moemerge.report.frame import render_in_frame
from moemerge.runtime.formatting import with_error
from moemerge.version import __version__

TEMPLATES: Final = "moemerge.lab.templates"
COLOURS: Final = 6  # colours of models in the style sheet


def write_scores_page(document: Mapping[str, Any], path: Path) -> Path:
    """Write the page to `path`, complete or not at all."""
    return save_page(render_scores(document), path)


def render_scores(document: Mapping[str, Any]) -> str:
    """Return the page of an evaluation's report, including the texts of `answers`."""
    models = list(document["models"])
    return render_in_frame(
        TEMPLATES,
        "scores",
        title=f"{', '.join(models)} · evaluation",
        top="scores",
        version=document["version"],
        filters={"points": _points, "signed": _signed, "place": _place, "nats": _nats},
        document=document,
        models=models,
        colours={model: place % COLOURS for place, model in enumerate(models)},
        pairs=_pairs(document),
        reach=_reach(document),
        answers=compressed(json.dumps(document["answers"], separators=(",", ":"))),
    )


def _pairs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every pair of models, with its row for each task and average."""
    rows = document["results"]
    return [
        {
            "first": pair["first"],
            "second": pair["second"],
            "rows": [{**row["pairs"][place], "title": row["title"]} for row in rows],
        }
        for place, pair in enumerate(rows[0]["pairs"] if rows else ())
    ]


def _reach(document: Mapping[str, Any]) -> float:
    """Return the largest end of an interval, so that all are drawn to one scale."""
    ends = [abs(e) for r in document["results"] for p in r["pairs"] for e in p["interval"]]
    return float(max([0.01, *ends]))


def _points(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _nats(one: Mapping[str, Any], key: str) -> str:
    """Return a loss, or a difference of losses, with its standard error."""
    return with_error(one[key], one["error"], signed=key == "difference")


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def _place(value: float, reach: float) -> str:
    """Return the position of a difference between −reach and reach, in percent."""
    return f"{50 + 50 * value / reach:.2f}"


def tables_page(title: str, about: str, parts: Sequence[Any], legend: str) -> str:
    """Return the page of a study; `parts` are its summaries, with their tables and figure."""
    return render_in_frame(
        TEMPLATES,
        "tables",
        title=f"{title} · study",
        top="beginning",
        version=__version__,
        filters={},
        heading=title,
        about=about,
        legend=legend,
        # The figure is our own SVG, hence safe.
        parts=[(summary, tables, figure and Markup(figure)) for summary, tables, figure in parts],
    )
