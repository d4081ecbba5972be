"""The parts of a table: rows, the cell behind each, how it is shown; and tables as text."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from moemerge.lab.experiments.settings import AS_MERGED as AS_MERGED

# The first group of rows in most tables, and row labels that plots and verdicts refer to.
REFERENCE = "reference"
AVERAGED = "routers averaged"
HARC = "HARC"
SOURCE = "source targets"
EXACT = "source targets, exact"
REFIT = "refit"
REFIT_BASE = "refit, with the base"
TUNED = "fine-tuned, best of four"


class Measurement(Protocol):
    """A cell: a measurement of some models. Equal names mean equal results."""

    @property
    def name(self) -> str: ...

    @property
    def domains(self) -> tuple[str, ...]: ...

    @property
    def nodes(self) -> tuple[Any, ...]:
        """All nodes that must exist before it is measured."""
        ...


class Repeat(Protocol):
    """One of the sets over which the rows of a table are repeated."""

    @property
    def name(self) -> str: ...

    @property
    def seed(self) -> int: ...

    def to_json(self) -> Mapping[str, Any]: ...


C = TypeVar("C", bound=Measurement, covariant=True)


@dataclass(frozen=True)
class Row(Generic[C]):
    """A row of a table. Rows of a group are compared with its first row."""

    group: str
    label: str
    cell: C
    x: float | None = None  # position on a sweep's axis


@dataclass(frozen=True)
class TableForm:
    """How a table is titled, compared and drawn."""

    name: str
    title: str
    about: str
    domains: tuple[str, ...]
    figure: str  # bars, groups, lines, swap or layers
    axis: str = ""
    compare: tuple[tuple[str, str], ...] = ()  # pairs of labels, first against second
    control: str = ""  # label of the merge with averaged routers, which a repair must beat
    singles: tuple[str, ...] = ()  # reference rows that are one model each: the base, sources
    tasks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # domain -> task -> title
    # whether paired tests run over seeds or over problems
    paired_by: Literal["seeds", "problems"] = "seeds"
    variant: str = ""  # distinguishes tables that share a name
    shared: Mapping[str, str] = field(default_factory=dict)  # properties that all its sets share

    @property
    def file(self) -> str:
        """The name of its files, without a suffix."""
        return f"{self.name}-{self.variant}" if self.variant else self.name

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.variant} specialists" if self.variant else self.title


# --- Markdown, CSV and LaTeX ----------------------------------------------------------------------

# Characters that are special in LaTeX, or may be missing in its fonts.
_LATEX: Final = str.maketrans(
    {
        **{mark: f"\\{mark}" for mark in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"$<$",
        ">": r"$>$",
        "±": r"$\pm$",
        "−": r"$-$",
        "Δ": r"$\Delta$",
        "α": r"$\alpha$",
        "γ": r"$\gamma$",
        "λ": r"$\lambda$",
    }
)
_NEGATIVE: Final = re.compile(r"(?<![\w.])-(?=\d)")
# Separators of two numbers in a cell, and the headings of the two in CSV.
_PAIRS: Final = {" ± ": ("", ", ±"), " to ": (", from", ", to"), " : ": ("", ", lost")}

_FORMULA: Final = re.compile(r"[=@\t\r]|[+-](?![\d.])")


@dataclass(frozen=True)
class TextTable:
    """Headings and rows of plain text; the first `left` columns are text."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 2

    def without_empty_columns(self) -> TextTable:
        """Return the table without columns that no row has a value for."""
        kept = [n for n in range(len(self.headings)) if any(row[n] for row in self.rows)]
        kept = kept or list(range(len(self.headings)))
        rows = tuple(tuple(row[n] for n in kept) for row in self.rows)
        return TextTable(tuple(self.headings[n] for n in kept), rows, self.left)

    def markdown(self) -> str:
        bars = ["---" if n < self.left else "---:" for n in range(len(self.headings))]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in (self.headings, *self.rows)]
        lines = [rows[0], bars, *rows[1:]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def csv(self) -> str:
        """Return comma-separated values for programs: one number per cell."""
        columns: list[list[str]] = []
        for number, column in enumerate(zip(self.headings, *self.rows, strict=True)):
            columns += [list(column)] if number < self.left else _numbers(*column)
        text = io.StringIO()
        lines = [[_plain(cell) for cell in line] for line in zip(*columns, strict=True)]
        csv.writer(text, lineterminator="\n").writerows(lines)
        return text.getvalue()

    def latex(self) -> str:
        """Return a tabular with booktabs rules, and a rule wherever the first column changes."""
        words = "l" * self.left + "r" * (len(self.headings) - self.left)
        lines = [rf"\begin{{tabular}}{{{words}}}", r"\toprule", _line(self.headings), r"\midrule"]
        for before, row in pairwise([None, *self.rows]):
            assert row is not None  # only the first row has none before it
            again = before is not None and before[0] == row[0]
            if before is not None and not again:
                lines.append(r"\midrule")
            lines.append(_line(("", *row[1:]) if again else row))
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _plain(cell: str) -> str:
    """Mark a name that starts like a formula as text: a spreadsheet would execute it."""
    return f"'{cell}" if _FORMULA.match(cell) else cell


def _line(cells: tuple[str, ...]) -> str:
    # A minus sign instead of a hyphen.
    minus = (_NEGATIVE.sub("−", cell) for cell in cells)
    return f"{' & '.join(cell.translate(_LATEX) for cell in minus)} \\\\"


def _numbers(heading: str, *cells: str) -> list[list[str]]:
    """Split a column into columns of single numbers: value and error, two ends, or two counts."""
    for mark, names in _PAIRS.items():
        if any(mark in cell for cell in cells):
            first, second = heading.split(mark) if mark in heading else (heading + n for n in names)
            pairs = [cell.partition(mark) for cell in cells]
            return [[first, *(p[0] for p in pairs)], [second, *(p[2] for p in pairs)]]
    return [[heading, *(cell.removeprefix("< ") for cell in cells)]]
