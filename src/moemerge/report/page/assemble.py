"""The page put together: sections in their order, the library and the figures packed into it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

from moemerge.errors import DataError
from moemerge.report.page import tables
from moemerge.report.page.charts_causes import swaps
from moemerge.report.page.charts_checks import checks
from moemerge.report.page.charts_experts import flows, loads
from moemerge.report.page.charts_layers import DRIFT, KL, MISMATCH, panels
from moemerge.report.page.charts_solver import solver
from moemerge.report.page.plots import Group
from moemerge.report.page.reading import Reading
from moemerge.report.words import short

TITLE = 60


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that says how to read what follows, and the charts."""

    key: str
    nav: str
    title: str
    lede: str
    groups: tuple[Group, ...]
    pair: bool = False  # two groups side by side


def render(document: Mapping[str, Any]) -> str:
    reading = Reading(document)
    if not reading.layers or not reading.models:
        raise DataError("the diagnosis has no layers, so there is nothing to show on a page")
    sections = _sections(reading)
    charts = [c.payload() for s in sections for g in s.groups for c in g.charts]
    verdict = document.get("verdict") or {}
    here = files(__package__)
    # Autoescape on, whatever the template's name: every label comes from somebody's file.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["flags"] = _flags
    template = environment.from_string(here.joinpath("page.html").read_text("utf-8"))
    return template.render(
        title=short(reading.names[reading.models[0]], TITLE),
        # Our own files; nothing of the document is in them.
        style=Markup(here.joinpath("style.css").read_text("utf-8")),
        script=Markup(here.joinpath("page.js").read_text("utf-8")),
        library=_library(),
        figures=packed(_json(charts)),
        reading=reading,
        words=str(verdict.get("words") or "What the merge did to the routing"),
        numbers=[(n.get("text"), n.get("label")) for n in verdict.get("numbers") or []],
        advice=[str(text) for text in document.get("advice") or []],
        notices=[str(text) for text in document.get("notices") or []],
        command=str(document.get("command") or ""),
        version=str(document.get("version") or ""),
        headline=tables.headline(reading),
        sections=sections,
        total_titles=tables.TOTAL_TITLES,
        totals=tables.totals(reading),
        columns=tables.columns_of(reading),
        rows=tables.all_rows(reading),
        facts=tables.facts(reading),
    )


def packed(text: str) -> str:
    """Compressed and in base64: a third of the size, and nothing in it can end a script element."""
    # mtime=0: the same document gives the same page.
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 6, mtime=0)).decode()


@cache
def _library() -> str:
    return packed(get_plotlyjs())


def _flags(text: str) -> Markup:
    """Escaped, with the command line's flags set as code, which no line break takes apart."""
    return Markup(re.sub(r"(?<![\w-])(--[a-z][a-z-]*)", r"<code>\1</code>", str(escape(text))))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _sections(reading: Reading) -> list[Section]:
    found = [_layers(reading), _experts(reading), _flow(reading), _causes(reading)]
    found += [_checks(reading), _solver(reading)]
    return [section for section in found if section is not None]


def _layers(reading: Reading) -> Section:
    return Section(
        "layers",
        "Layers",
        "Where the routing moved",
        "Every token picks a few experts in every layer. Up means that the model picks others "
        "than the source would: mismatch counts the picks that changed, KL weighs how strongly "
        "the routing distribution changed. The dotted line puts both routers on the model's own "
        "features: what the routers themselves do wrong, and calibration can repair.",
        (panels(reading, MISMATCH), panels(reading, KL)),
        pair=len(reading.domains) == 1,
    )


def _experts(reading: Reading) -> Section | None:
    if not any(row.get("load") for row in reading.layers):
        return None
    return Section(
        "experts",
        "Experts",
        "Who carries the load",
        "Each tile is an expert of a layer. Left, how the source spreads its text over the "
        "experts; then the model on the same text; then what changed: blue experts gained work, "
        "orange ones lost it.",
        (loads(reading),),
    )


def _flow(reading: Reading) -> Section | None:
    if not any(row.get("flow") for row in reading.layers):
        return None
    return Section(
        "flow",
        "Flow",
        "Which experts lost tokens to which",
        "The choices that moved, from the expert that the source picks to the one that the model "
        "picks instead. It opens at the layer with the highest mismatch.",
        (flows(reading),),
    )


def _causes(reading: Reading) -> Section:
    swapped = swaps(reading)
    tried = (
        " The bars exchange the routers: what the model gains from the source's routers is the "
        "routers' share of the damage."
        if swapped
        else ""
    )
    return Section(
        "causes",
        "Causes",
        "Routers, or what they are fed",
        "A router can only be as right as its input. Drift says how far the hidden state in front "
        "of each router has moved from the source's." + tried,
        (panels(reading, DRIFT), *([swapped] if swapped else [])),
    )


def _checks(reading: Reading) -> Section:
    return Section(
        "checks",
        "Premises",
        "Does the theory apply here?",
        "Calibration replaces the divergence by a quadratic model, which holds while the logits "
        "move little. Where most tokens stay below 0.2 and the dots lie on the dashed line, it "
        "can be trusted; elsewhere --objective exact minimises the divergence itself.",
        (checks(reading),),
    )


def _solver(reading: Reading) -> Section | None:
    group = solver(reading)
    if group is None:
        return None
    return Section(
        "solver",
        "Solver",
        "How the calibration converged",
        f"{reading.calibrated} carries the report of its calibration: conjugate gradients solved "
        "for the router of each layer.",
        (group,),
    )
