"""Names and numbers as people read them, on a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

# Longer names are cut in the middle where space is short: the ends of a path say most.
SHORT = 28
NONE = "–"
# More runs of layers than this are counted, not listed.
RUNS = 4


class Quantity(StrEnum):
    """What a figure's value is, and so how it is written."""

    SHARE = "share"
    NATS = "nats"
    LOSS = "loss"  # in nats as well, but read to the third decimal
    RATIO = "ratio"
    COUNT = "count"
    EXPERTS = "experts"  # a list of experts, of which people are told how many
    DATA = "data"  # arrays, for programs and charts

    def text(self, value: Any) -> str:
        """The value for people."""
        value = amount(value)
        if value is None:
            return NONE
        if self in (Quantity.COUNT, Quantity.EXPERTS):
            return f"{value:.1f}" if value % 1 else f"{value:.0f}"
        if self is Quantity.LOSS:
            return f"{value:.3f}"
        return percent(value) if self is Quantity.SHARE else plain(value)


@dataclass(frozen=True)
class FigureWords:
    """A figure's name and words, and where it is shown."""

    name: str
    heading: str  # of a column
    meaning: str  # a phrase for the docs and the page
    quantity: Quantity
    summary: bool = False  # in the tables of totals
    minor: bool = False  # only where there is room
    out_of: str = ""  # the figure that this one is a part of

    def text(self, figures: Mapping[str, Any]) -> str:
        """Its value among `figures`, for people."""
        shown = self.quantity.text(figures.get(self.name))
        return f"{shown}/{figures[self.out_of]}" if figures.get(self.out_of) else shown

    def raw(self, figures: Mapping[str, Any]) -> str:
        """Its value for programs that read tables."""
        value = amount(figures.get(self.name))
        return "" if value is None else f"{value:.6g}"

    def to_json(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(FigureWords)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        known = {f.name: data[f.name] for f in fields(FigureWords) if f.name in data}
        return cls(**{**known, "quantity": Quantity(data["quantity"])})


# --- numbers ------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """A finite number, or None: what a table and a chart leave a gap for."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def amount(value: Any) -> float | None:
    """A number, or of a list how many."""
    return number(len(value) if isinstance(value, list | tuple) else value)


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are numbers."""
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def percent(share: float | None) -> str:
    """0.1234 as 12.3%, two digits where it is small."""
    if share is None:
        return NONE
    value = 100 * share
    return f"{value:.1f}%" if value == 0 or abs(value) >= 1 else f"{value:.2g}%"


def p_value(p: float) -> str:
    """Of a test; below a thousandth only that it is."""
    return f"{p:.3f}" if p >= 0.001 else "<0.001"


def plain(value: float | None, digits: int = 3) -> str:
    """Significant digits, no exponent unless it is tiny."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


# --- names --------------------------------------------------------------------------------------


def display_names(labels: Sequence[str]) -> list[str]:
    """Of each label its last path component, or so many more that different labels stay different.

    `out/ties` and `out/wudi` become `ties` and `wudi`; `a/merged` and `b/merged` stay as they are.
    The components of both sides of a `model+lora` are counted.
    """
    deepest = max((label.count("/") for label in labels), default=0) + 1
    for depth in range(1, deepest + 1):
        names = [_end(label, depth) for label in labels]
        if len(set(names)) == len(set(labels)):
            return names
    return list(labels)  # such as `out` and `out/`


def _end(label: str, depth: int) -> str:
    ends = ["/".join(part.rstrip("/").split("/")[-depth:]) for part in label.split("+")]
    return "+".join(ends) or label


def short(label: str, limit: int = SHORT) -> str:
    """A label within `limit` characters, its middle left out where it is longer."""
    label = " ".join(label.split())
    if len(label) <= limit:
        return label
    tail = (limit - 1) * 2 // 3
    return f"{label[: limit - 1 - tail]}…{label[-tail:]}"


def layers_in_words(layers: Sequence[int]) -> str:
    """Layer numbers: layer 3; layers 0–4, 7; 23 layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    if len(runs) > RUNS:
        return f"{len(layers)} layers"
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(shown)}"
