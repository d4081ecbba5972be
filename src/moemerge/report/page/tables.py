"""What the page says in tables: totals by domain, all rows, how to repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moemerge.report.page.reading import Reading, number, percent, plain
from moemerge.report.words import short

LABEL = 40


@dataclass(frozen=True)
class Column:
    """A column of the table of all rows."""

    key: str
    title: str
    meaning: str
    kind: str = "plain"  # text, percent, plain, count
    minor: bool = False  # left out on paper, which is narrow

    @property
    def classes(self) -> str:
        """For the style sheet: texts to the left, minor columns not on paper."""
        return " ".join(["t"] * (self.kind == "text") + ["minor"] * self.minor)

    def cell(self, value: Any) -> Cell:
        if self.kind == "text":
            return Cell(short(str(value), LABEL), str(value))
        found = float(len(value)) if isinstance(value, list) else number(value)
        if found is None:
            return Cell("–", "")
        if self.kind == "count":
            return Cell(f"{found:.0f}", f"{found:.0f}")
        return Cell(percent(found) if self.kind == "percent" else plain(found), f"{found:.6g}")


@dataclass(frozen=True)
class Cell:
    """What a reader sees, and what sorting and the download use."""

    text: str
    value: str
    share: float | None = None  # of a bar behind the number


COLUMNS = (
    Column("model", "Model", "which model", "text"),
    Column("domain", "Domain", "whose text, and which source it is compared with", "text"),
    Column("layer", "Layer", "decoder layer", "count"),
    Column("mismatch", "Mismatch", "share of the source's choices not made", "percent"),
    Column("any_mismatch", "Tokens hit", "share of tokens with any mismatch", "percent"),
    Column("kl", "KL", "KL(source ‖ model), each on its own features, nats"),
    Column("kl_on_features", "KL, routers alone", "both routers on the model's features, nats"),
    Column("mismatch_on_features", "Mismatch, routers alone", "likewise", "percent", True),
    Column("top1_agreement", "Top-1 same", "share of tokens with the same first expert", "percent"),
    Column("weighted_overlap", "Overlap", "weight on experts that both chose", "percent", True),
    Column("drift", "Drift", "relative change of the router's input", "percent"),
    Column("logit_shift", "Logit shift", "relative change of the logits"),
    Column("shift_small", "Shift < 0.1", "share of tokens", "percent", True),
    Column("shift_moderate", "Shift < 0.2", "share of tokens", "percent", True),
    Column("quadratic", "Quadratic", "second-order model of KL, routers alone", minor=True),
    Column("entropy_source", "Source's entropy", "of the load; 100% is even", "percent", True),
    Column("entropy", "Entropy", "of the load; 100% is even", "percent", True),
    Column("dead", "Idle", "experts that the source uses and the model does not", "count"),
    Column("overloaded", "Overloaded", "experts with a multiple of the source's load", "count"),
    Column("tokens", "Tokens", "measured", "count", True),
)


def columns_of(reading: Reading) -> list[Column]:
    """Without the columns that would say the same in every row, or nothing."""
    single = {"model": len(reading.models) < 2, "domain": len(reading.domains) < 2}
    present = {key for row in reading.layers for key in row}
    return [c for c in COLUMNS if c.key in present and not single.get(c.key, False)]


def all_rows(reading: Reading) -> list[list[Cell]]:
    """A row for each model, domain and router, in that order."""
    columns = columns_of(reading)
    # Short to read, whole in the download.
    called = {m: Cell(short(reading.names[m], LABEL), reading.labels[m]) for m in reading.models}
    return [
        [
            called[model] if column.key == "model" else column.cell(row.get(column.key))
            for column in columns
        ]
        for model in reading.models
        for domain in reading.domains
        for row in reading.rows(model, domain)
    ]


@dataclass(frozen=True)
class Total:
    """A model's line in the overview of a domain."""

    domain: str
    first: bool  # of its domain
    span: int  # lines of its domain
    name: str  # as short as tells the models apart
    label: str  # in full
    accent: bool
    cells: tuple[Cell, ...]


TOTAL_TITLES = (
    ("Mismatch", "share of the source's Top-k choices that the model does not make"),
    ("Per token", "of a token's choices over all layers, how many differ"),
    ("KL", "KL(source ‖ model) of the routing, mean over the layers, nats"),
    ("Routers alone", "the same with both routers on the model's features"),
    ("Loss", "next-token loss, nats per token"),
    ("Source's loss", "of the domain's own source"),
)


def totals(reading: Reading) -> list[Total]:
    """The overview: each domain, each model, the figures that matter most."""
    found = []
    highest = max((number(t.get("mismatch")) or 0.0 for t in reading.totals), default=0.0)
    for domain in reading.domains:
        have = [model for model in reading.models if reading.total(model, domain)]
        for i, model in enumerate(have):
            found.append(
                Total(
                    domain=domain,
                    first=i == 0,
                    span=len(have),
                    name=reading.names[model],
                    label=reading.labels[model],
                    accent=model == reading.models[0],
                    cells=_total_cells(reading.total(model, domain), highest),
                )
            )
    return found


def _total_cells(total: Any, highest: float) -> tuple[Cell, ...]:
    def figure(key: str) -> float | None:
        return number(total.get(key))

    mismatch = figure("mismatch")
    share = None if mismatch is None or not highest else mismatch / highest
    per_token, choices = figure("mismatched_per_token"), figure("choices_per_token")
    counted = plain(per_token) + (f" of {choices:.0f}" if choices is not None else "")
    return (
        Cell(percent(mismatch), "", share),
        Cell(counted, ""),
        *(Cell(plain(figure(key)), "") for key in ("kl", "kl_on_features")),
        *(Cell(plain(figure(key), 4), "") for key in ("loss", "loss_source")),
    )


def facts(reading: Reading) -> list[tuple[str, str]]:
    """What was measured, on what, with what."""
    document = reading.document
    model = document.get("model") or {}
    found = [
        ("Model", reading.labels[reading.models[0]]),
        *(("Compared with", reading.labels[name]) for name in reading.models[1:]),
        ("Architecture", model.get("architecture")),
        ("Gate", model.get("gate")),
        *((f"Source, {d}", reading.source_label(d)) for d in reading.domains),
        *((f"Text, {d}", _text_of(document, d)) for d in reading.domains),
        ("Settings", _settings(document.get("settings") or {})),
        ("Ran on", " · ".join(str(document[k]) for k in ("device", "dtype") if document.get(k))),
        ("Version", f"moemerge {document.get('version', '')}"),
        ("Made", str(document.get("created", ""))),
    ]
    return [(name, str(value)) for name, value in found if value]


def _text_of(document: Any, domain: str) -> str:
    text = (document.get("domains") or {}).get(domain) or {}
    files = ", ".join(str(file) for file in text.get("files") or [])
    return f"{files} · {count(text.get('rows'))} rows, {count(text.get('tokens'))} tokens"


def _settings(settings: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)


def count(value: Any) -> str:
    found = number(value)
    return "–" if found is None else f"{found:,.0f}"


def headline(reading: Reading) -> list[str]:
    """The line under the title: what kind of model, how much text."""
    model = reading.document.get("model") or {}
    tokens = [number((t or {}).get("tokens")) for t in _domains(reading)]
    parts = [
        str(model.get("architecture") or ""),
        _many(model.get("layers"), "layer"),
        f"top {model['top_k']} of {model['experts']} experts" if model.get("experts") else "",
        _many(len(reading.domains), "domain"),
        f"{count(sum(value or 0.0 for value in tokens))} tokens",
    ]
    return [part for part in parts if part]


def _domains(reading: Reading) -> Sequence[Any]:
    return list((reading.document.get("domains") or {}).values())


def _many(value: Any, noun: str) -> str:
    return "" if value is None else f"{value} {noun}" + ("" if value == 1 else "s")
