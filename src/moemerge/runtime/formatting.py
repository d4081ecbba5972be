"""Format names and numbers for people, on a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

# Longer names are cut in the middle if space is short: the ends of a path are the most telling.
SHORT = 28
NONE = "–"
# More ranges of layers than this are counted, not listed.
RUNS = 4


class Quantity(StrEnum):
    """The kind of a figure's value, which decides its format."""

    SHARE = "share"
    NATS = "nats"
    LOSS = "loss"  # in nats too, but with three decimals
    RATIO = "ratio"
    COUNT = "count"
    EXPERTS = "experts"  # a list of experts, shown as their number
    DATA = "data"  # arrays, for programs and charts

    def text(self, value: Any) -> str:
        """Return the value, formatted for display."""
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
    """A figure's name, description and places of display."""

    name: str
    heading: str  # heading of a column
    meaning: str  # a phrase for the docs and the page
    quantity: Quantity
    summary: bool = False  # in the tables of totals
    minor: bool = False  # only if there is space
    out_of: str = ""  # the figure that contains this one

    def text(self, figures: Mapping[str, Any]) -> str:
        """Return this quantity of `figures`, formatted for display."""
        shown = self.quantity.text(figures.get(self.name))
        return f"{shown}/{figures[self.out_of]}" if figures.get(self.out_of) else shown

    def raw(self, figures: Mapping[str, Any]) -> str:
        """Return its value for programs."""
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
    """Return a finite number, or None, which tables and charts show as a gap."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def amount(value: Any) -> float | None:
    """Return a number, or the length of a list."""
    return number(len(value) if isinstance(value, list | tuple) else value)


def known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are numbers."""
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def with_error(value: float, error: float | None, *, signed: bool = True) -> str:
    """Return a loss in nats, or a change of it, with its standard error if it has one."""
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    return text if error is None else f"{text} ± {error:.3f}"


def percent(share: float | None) -> str:
    """Format 0.1234 as 12.3%, with two decimals if it is small."""
    if share is None:
        return NONE
    value = 100 * share
    return f"{value:.1f}%" if value == 0 or abs(value) >= 1 else f"{value:.2g}%"


LEAST_P = 1e-4  # p values below are shown as `< 1e-4`


def p_value(p: float, least: float = LEAST_P) -> str:
    """Format a p value; one below `least` as `< 1e-4`."""
    if p < least:
        mantissa, exponent = f"{least:.0e}".split("e")
        return f"< {mantissa}e{int(exponent)}"
    return f"{p:.3f}" if p >= 0.001 else f"{p:.4f}"


def plain(value: float | None, digits: int = 3) -> str:
    """Format with significant digits, and with an exponent only if it is tiny."""
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
    """Return the last path component of each label, or more if needed to keep labels different.

    `out/ties` and `out/wudi` become `ties` and `wudi`; `a/merged` and `b/merged` are unchanged.
    Both sides of `model+lora` are shortened.
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
    """Return a label of at most `limit` characters, with its middle left out if needed."""
    label = " ".join(label.split())
    if len(label) <= limit:
        return label
    tail = (limit - 1) * 2 // 3
    return f"{label[: limit - 1 - tail]}…{label[-tail:]}"


def layers_in_words(layers: Sequence[int]) -> str:
    """Format layer numbers: layer 3; layers 0–4, 7; 23 layers."""
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


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats a token; above e^700 it would overflow."""
    return math.exp(min(loss, 700.0))
