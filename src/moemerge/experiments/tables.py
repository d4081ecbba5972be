"""The parts of a table: rows, the cell behind each, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from moemerge.experiments.settings import AS_MERGED as AS_MERGED

# The first group of many tables, and labels of rows that figures and verdicts use.
REFERENCE = "reference"
AVERAGED = "routers averaged"
HARC = "HARC"
SOURCE = "source targets"
EXACT = "source targets, exact"
EXACT_BASE = "source targets, exact, with the base"
REFIT = "refit"
REFIT_FIXED = "refit, λ = 0.003"
REFIT_BASE = "refit, with the base"
REFIT_KEPT = "refit, with the base on text of what is untouched"
TUNED = "fine-tuned, best of four"


class Measurement(Protocol):
    """A cell: a measurement of some models. Equal names mean equal results."""

    @property
    def name(self) -> str: ...

    @property
    def domains(self) -> tuple[str, ...]: ...


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
