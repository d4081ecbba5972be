"""Assemble the page: fill in page.html, and embed the library and the charts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from moemerge.report.files import compressed
from moemerge.report.frame import render_in_frame
from moemerge.report.page.checks import checks, solver
from moemerge.report.page.experts import flows, loads
from moemerge.report.page.layers import DRIFT, KL, MISMATCH, panels, refit_charts, swaps
from moemerge.report.page.plots import Group, Reading, lines_of
from moemerge.runtime.formatting import NONE, Quantity, number, short, with_error
from moemerge.runtime.progress import counted

TITLE = 60


def render_diagnosis(document: Mapping[str, Any]) -> str:
    reading = Reading(document)
    groups = _groups(reading)
    charts = [chart.payload() for own in groups.values() for g in own for chart in g.charts]
    present = {key for row in reading.layers for key in row}
    first = reading.rows(reading.models[0], reading.domains[0])
    return render_in_frame(
        __package__,
        "page",
        title=f"{short(reading.names[reading.models[0]], TITLE)} · routing diagnosis",
        top="summary",
        version=document["version"],
        filters={
            "flags": _flags,
            "capital": _capital,
            "count": _count,
            "short": short,
            "loss": _loss,
        },
        library=_library(),
        charts=compressed(_json(charts)),
        groups=groups,
        document=document,
        reading=reading,
        several=len(reading.models) > 1,
        lines=lines_of(reading),
        verdict=document["verdict"],
        theory=_theory(reading),
        headline=_headline(reading),
        summary=[figure for figure in reading.figures.values() if figure.summary],
        highest=max((number(t.get("mismatch")) or 0.0 for t in reading.totals), default=0.0),
        columns=[
            figure
            for figure in reading.figures.values()
            if figure.name in present and figure.quantity is not Quantity.DATA
        ],
        repeated=len({row["layer"] for row in first}) < len(first),
        settings=[f"{n} {value}" for n, value in document["settings"].items() if value is not None],
    )


def _groups(reading: Reading) -> dict[str, tuple[Group, ...]]:
    """Return the charts of every section; sections without charts are not shown."""
    loaded, moved = (any(row.get(key) for row in reading.layers) for key in ("load", "flow"))
    swapped, solved = swaps(reading), solver(reading)
    return {
        "layers": (panels(reading, MISMATCH), panels(reading, KL)),
        "experts": (loads(reading),) if loaded else (),
        "flow": (flows(reading),) if moved else (),
        "causes": (panels(reading, DRIFT), *([swapped] if swapped else [])),
        "theory": checks(reading),
        "solver": (solved,) if solved else (),
        "refit": refit_charts(reading),
    }


@cache
def _library() -> str:
    return compressed(get_plotlyjs())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _flags(text: str) -> Markup:
    """Escape a text, and mark its flags as code without line breaks."""
    return Markup(re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"<code>\1</code>", str(escape(text))))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _count(value: Any) -> str:
    value = number(value)
    return NONE if value is None else f"{value:,.0f}"


def _loss(one: Mapping[str, Any], key: str, error: str) -> str:
    """Return a loss, or a change of it, with its standard error."""
    value, spread = number(one.get(key)), number(one.get(error))
    if value is None:
        return NONE
    return with_error(value, spread, signed=key == "change")


def _theory(reading: Reading) -> str:
    """Return the answer of the section's question; with several models, for which one."""
    answer = str(reading.document["verdict"]["theory"])
    if len(reading.models) > 1:
        return f"{reading.names[reading.models[0]]}: {answer[0].lower()}{answer[1:]}"
    return answer


def _headline(reading: Reading) -> list[str]:
    """Return the line below the title: the model's architecture and the amount of text."""
    model, texts = reading.document["model"], reading.document["domains"].values()
    return [
        model["architecture"],
        counted(model["layers"], "layer"),
        f"top {model['top_k']} of {model['experts']} experts",
        counted(len(texts), "domain"),
        counted(sum(text["tokens"] for text in texts), "token"),
    ]
