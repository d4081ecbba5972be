"""Pages: one HTML file each, which opens from disk and loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from moemerge.report.frame import render_in_frame
from moemerge.version import __version__


def tables_page(title: str, about: str, parts: Sequence[Any], legend: str) -> str:
    """Return the page of a study; `parts` are its summaries, with their tables and figure."""
    return render_in_frame(
        "moemerge.lab.templates",
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
