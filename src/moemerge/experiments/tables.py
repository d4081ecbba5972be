"""What a table is made of: its rows, what each measures, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from moemerge.experiments.settings import AS_MERGED as AS_MERGED

# The first group of many tables, and rows that figures and sentences know.
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
    """A cell: what is measured of which models. Equal names mean equal results."""

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
    """One line of a table. Rows of a group are compared with each other; its first is the start."""

    group: str
    label: str
    cell: C
    x: float | None = None  # its place on a sweep's axis


@dataclass(frozen=True)
class TableForm:
    """How a table is headed, compared and drawn."""

    name: str
    title: str
    about: str
    domains: tuple[str, ...]
    figure: str  # bars, groups, lines, swap or layers
    axis: str = ""
    compare: tuple[tuple[str, str], ...] = ()  # pairs of labels, first against second
    tasks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # domain -> task -> title
    paired_by: Literal["seeds", "problems"] = "seeds"  # what differences are taken over
    variant: str = ""  # one table of several that share a name
    shared: Mapping[str, str] = field(default_factory=dict)  # what all its sets have in common

    @property
    def file(self) -> str:
        """The name of its files, without an ending."""
        return f"{self.name}-{self.variant}" if self.variant else self.name

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.variant} specialists" if self.variant else self.title
