"""The page: a diagnosis as one HTML file that opens from disk and asks no network for anything.

    reading     the document: which models, domains and layers, and the words of their figures
    plots       plotly, and what a model looks like in every chart
    layers      mismatch, divergence and drift over the layers; routers exchanged
    experts     loads, and which experts lost tokens to which
    checks      whether the quadratic model holds; how a calibration converged
    assemble    page.html and page.js filled in and packed into one text, in the frame of all pages

plotly is an extra: nothing here imports it before `require_page` has found it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moemerge.errors import UsageError
from moemerge.report.files import save_page

# By the names they are imported by; all of them are in the extra.
NEEDED = ("plotly", "jinja2")


def require_page() -> None:
    """Refuse, before any long work, where the libraries that draw the page are missing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a report page needs {' and '.join(missing)}, which is not installed",
            hint='pip install "moemerge[report]"',
        )


def render_page(document: Mapping[str, Any]) -> str:
    """The whole page of a diagnosis document as text."""
    require_page()
    from moemerge.report.page.assemble import render

    return render(document)


def write_page(document: Mapping[str, Any], path: Path) -> Path:
    """Write the page to `path`, whole or not at all."""
    return save_page(render_page(document), path)
