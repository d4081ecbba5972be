"""The page of a diagnosis: one HTML file that opens from disk and needs no network.

plots       the document, plotly, and the colours and axes of all charts
layers      mismatch, divergence and drift over the layers; swapped routers; refit
experts     loads, and which experts lost tokens to which
checks      whether the quadratic model holds; how a calibration converged
assemble    page.html and page.js filled in and packed into one text

plotly is an extra: nothing here imports it before `require_page` has found it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moemerge.errors import UsageError
from moemerge.report.files import save_page


def require_page() -> None:
    """Refuse, before any long work, if the library that draws the page is missing."""
    if find_spec("plotly") is None:
        raise UsageError(
            "a report page needs plotly, which is not installed",
            hint='pip install "moemerge[report]"',
        )


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page of a diagnosis document as text."""
    require_page()
    from moemerge.report.page.assemble import render_diagnosis

    return render_diagnosis(document)


def write_page(document: Mapping[str, Any], path: Path) -> Path:
    """Write the page to `path`, complete or not at all."""
    return save_page(render_page(document), path)
