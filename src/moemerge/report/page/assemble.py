"""The page put together: sections in their order, tables, the library and the charts packed."""

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
from moemerge.report.page.checks import checks, solver
from moemerge.report.page.experts import flows, loads
from moemerge.report.page.layers import DRIFT, KL, MISMATCH, panels, swaps
from moemerge.report.page.plots import Group, lines_of
from moemerge.report.page.reading import Reading, Row
from moemerge.report.words import FigureWords, Quantity, number, short

TITLE = 60
LABEL = 40


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that says how to read what follows, and the charts."""

    key: str
    menu: str
    title: str
    lede: str
    groups: tuple[Group, ...]
    answer: str = ""  # where the title is a question
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
    environment.filters |= {"flags": _flags, "capital": _capital}
    template = environment.from_string(here.joinpath("page.html").read_text("utf-8"))
    columns = _columns(reading)
    return template.render(
        title=short(reading.names[reading.models[0]], TITLE),
        # Our own files; nothing of the document is in them.
        style=Markup(here.joinpath("style.css").read_text("utf-8")),
        script=Markup(here.joinpath("page.js").read_text("utf-8")),
        library=_library(),
        charts=packed(_json(charts)),
        reading=reading,
        lines=lines_of(reading),
        words=str(verdict.get("words") or "What the merge did to the routing"),
        numbers=[(n.get("text"), n.get("label")) for n in verdict.get("numbers") or []],
        advice=[str(text) for text in document.get("advice") or []],
        notices=[str(text) for text in document.get("notices") or []],
        command=str(document.get("command") or ""),
        version=str(document.get("version") or ""),
        headline=_headline(reading),
        sections=sections,
        summary=_summary(reading),
        totals=_totals(reading),
        columns=columns,
        rows=_rows(reading, columns),
        facts=_facts(reading),
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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# --- sections -----------------------------------------------------------------------------------


def _sections(reading: Reading) -> list[Section]:
    sections = [
        Section(
            "layers",
            "Layers",
            "Where the routing moved",
            "Every token picks a few experts in every layer. Up means that the model picks others "
            "than the source would: mismatch counts the picks that changed, KL weighs how strongly "
            "the routing distribution changed. The dotted line puts both routers on the model's "
            "own features: what the routers themselves do wrong, and calibration can repair.",
            (panels(reading, MISMATCH), panels(reading, KL)),
            pair=len(reading.domains) == 1,
        )
    ]
    if any(row.get("load") for row in reading.layers):
        sections.append(
            Section(
                "experts",
                "Expert load",
                "Who carries the load",
                "Each tile is an expert of a layer. Left, how the source spreads its text over "
                "the experts; then the model on the same text; then what changed: blue experts "
                "gained work, orange ones lost it.",
                (loads(reading),),
            )
        )
    if any(row.get("flow") for row in reading.layers):
        sections.append(
            Section(
                "flow",
                "Moved choices",
                "Which experts lost tokens to which",
                "The choices that moved, from the expert that the source picks (orange) to the "
                "one that the model picks instead (blue). It opens at the layer with the highest "
                "mismatch.",
                (flows(reading),),
            )
        )
    sections += [_causes(reading), _theory(reading)]
    group = solver(reading)
    if group is not None:
        name = reading.names.get(reading.calibrated, reading.calibrated)
        sections.append(
            Section(
                "solver",
                "Calibration",
                "How the calibration converged",
                f"{name} carries the report of its calibration: conjugate gradients solved for "
                "the router of each layer.",
                (group,),
            )
        )
    return sections


def _causes(reading: Reading) -> Section:
    swapped = swaps(reading)
    lede = (
        "A router can only be as right as its input. Drift says how far the hidden state in front "
        "of each router has moved from the source's."
    )
    if swapped:
        lede += (
            " The bars exchange the routers (hatched): what the model gains from the source's "
            "routers is the routers' share of the damage."
        )
    groups = (panels(reading, DRIFT), *([swapped] if swapped else []))
    return Section("causes", "Causes", "Routers, or what they are fed", lede, groups)


def _theory(reading: Reading) -> Section:
    answer = str((reading.document.get("verdict") or {}).get("theory") or "")
    if answer and len(reading.models) > 1:
        answer = f"{reading.names[reading.models[0]]}: {answer[0].lower()}{answer[1:]}"
    return Section(
        "theory",
        "Theory",
        "Does the theory apply here?",
        "Calibration replaces the divergence by a quadratic model, which is proven where the "
        "logits move little: it can be trusted where most tokens stay below 0.1, or where the dots "
        "lie on the dashed line all the same.",
        checks(reading),
        answer=answer,
        pair=True,
    )


# --- tables -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column of the table of all rows."""

    key: str
    title: str
    meaning: str
    kind: str = "number"  # or text
    minor: bool = False  # left out on paper, which is narrow

    @property
    def classes(self) -> str:
        """For the style sheet: texts to the left, minor columns not on paper."""
        return " ".join(["t"] * (self.kind == "text") + ["minor"] * self.minor)


@dataclass(frozen=True)
class TableCell:
    """What a reader sees, and what sorting and the download use."""

    text: str
    value: str = ""
    share: float | None = None  # of a bar in front of the number


def _columns(reading: Reading) -> list[Column]:
    """Without those that would say the same in every row, or nothing."""
    first = reading.rows(reading.models[0], reading.domains[0])
    repeated = len({row["layer"] for row in first}) < len(first)
    before = [
        Column("model", "Model", "which model", "text") if len(reading.models) > 1 else None,
        Column("domain", "Domain", "whose text, and which source it is compared with", "text")
        if len(reading.domains) > 1
        else None,
        Column("layer", "Layer", "decoder layer"),
        Column("router", "Router", "the weight's name", "text", True) if repeated else None,
    ]
    present = {key for row in reading.layers for key in row}
    figures = [
        Column(figure.name, _capital(figure.heading), figure.meaning, minor=figure.minor)
        for figure in reading.figures.values()
        if figure.name in present and figure.quantity is not Quantity.DATA
    ]
    tokens = Column("tokens", "Tokens", "measured", minor=True)
    return [*(column for column in before if column), *figures, tokens]


def _rows(reading: Reading, columns: list[Column]) -> list[list[TableCell]]:
    """A row for each model, domain and router, in that order."""
    return [
        [_cell(reading, row, column) for column in columns]
        for model in reading.models
        for domain in reading.domains
        for row in reading.rows(model, domain)
    ]


def _cell(reading: Reading, row: Row, column: Column) -> TableCell:
    value = row.get(column.key)
    if column.key == "model":  # short to read, whole in the download
        return TableCell(short(reading.names[str(value)], LABEL), reading.labels[str(value)])
    if column.kind == "text":
        return TableCell(short(str(value), LABEL), str(value))
    figure = reading.figures.get(column.key)
    text = figure.text(row) if figure else Quantity.COUNT.text(value)
    plain = number(len(value) if isinstance(value, list) else value)
    return TableCell(text, "" if plain is None else f"{plain:.6g}")


@dataclass(frozen=True)
class Total:
    """A model's line in the overview of a domain."""

    model: str
    domain: str
    first: bool  # of its domain
    span: int  # lines of its domain
    cells: tuple[TableCell, ...]


def _summary(reading: Reading) -> list[FigureWords]:
    return [figure for figure in reading.figures.values() if figure.summary]


def _totals(reading: Reading) -> list[Total]:
    """The overview: each domain, each model, the figures that matter most."""
    totals = []
    highest = max((number(t.get("mismatch")) or 0.0 for t in reading.totals), default=0.0)
    for domain in reading.domains:
        have = [model for model in reading.models if reading.total(model, domain)]
        for i, model in enumerate(have):
            total = reading.total(model, domain)
            cells = [TableCell(figure.text(total)) for figure in _summary(reading)]
            mismatch = number(total.get("mismatch"))
            if cells and mismatch is not None and highest:
                cells[0] = TableCell(cells[0].text, share=mismatch / highest)
            totals.append(Total(model, domain, i == 0, len(have), tuple(cells)))
    return totals


def _facts(reading: Reading) -> list[tuple[str, str]]:
    """What was measured, on what, with what."""
    document = reading.document
    model, settings = document.get("model") or {}, document.get("settings") or {}
    facts = [
        ("Model", reading.labels[reading.models[0]]),
        *(("Compared with", reading.labels[name]) for name in reading.models[1:]),
        ("Architecture", model.get("architecture")),
        ("Gate", model.get("gate")),
        *((f"Source, {d}", reading.source_label(d)) for d in reading.domains),
        *((f"Text, {d}", _text_of(document, d)) for d in reading.domains),
        ("Settings", ", ".join(f"{k} {v}" for k, v in settings.items() if v is not None)),
        ("Ran on", " · ".join(str(document[k]) for k in ("device", "dtype") if document.get(k))),
        ("Version", f"moemerge {document.get('version', '')}"),
        ("Made", str(document.get("created", ""))),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _text_of(document: Any, domain: str) -> str:
    text = (document.get("domains") or {}).get(domain) or {}
    names = ", ".join(str(file) for file in text.get("files") or [])
    return f"{names} · {_count(text.get('rows'))} rows, {_count(text.get('tokens'))} tokens"


def _count(value: Any) -> str:
    value = number(value)
    return "–" if value is None else f"{value:,.0f}"


def _headline(reading: Reading) -> list[str]:
    """The line under the title: what kind of model, how much text."""
    model = reading.document.get("model") or {}
    texts = (reading.document.get("domains") or {}).values()
    tokens = sum(number((text or {}).get("tokens")) or 0.0 for text in texts)
    parts = [
        str(model.get("architecture") or ""),
        _many(model.get("layers"), "layer"),
        f"top {model['top_k']} of {model['experts']} experts" if model.get("experts") else "",
        _many(len(reading.domains), "domain"),
        f"{_count(tokens)} tokens",
    ]
    return [part for part in parts if part]


def _many(value: Any, noun: str) -> str:
    return "" if value is None else f"{value} {noun}" + ("" if value == 1 else "s")
