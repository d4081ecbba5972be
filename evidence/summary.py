"""Means over seeds and comparisons paired over seeds, as tables.

Cells are measured by `evidence.cells`; `seed_tables` writes the tables of these summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from evidence.cells import Cell, SetKey
from evidence.packing import unpack
from moemerge.lab.significance import McNemar, Mean, PairedTest, mcnemar, mean, paired_t

# The first group of rows in most tables, and row labels that verdicts refer to.
REFERENCE = "reference"
AS_MERGED = "as merged"
AVERAGED = "routers averaged"
HARC = "HARC"
SOURCE = "source targets"
EXACT = "source targets, exact"
REFIT = "refit"
REFIT_BASE = "refit, with the base"
TUNED = "fine-tuned, best of four"
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of a table. Rows of a group are compared with its first row."""

    group: str
    label: str
    cell: Cell
    x: float | None = None  # position on a sweep's axis


@dataclass(frozen=True)
class TableForm:
    """How a table is titled and compared."""

    name: str
    title: str
    about: str
    domains: tuple[str, ...]
    compare: tuple[tuple[str, str], ...] = ()  # pairs of labels, first against second
    variant: str = ""  # distinguishes tables that share a name
    shared: Mapping[str, str] = field(default_factory=dict)  # properties that all its sets share

    @property
    def file(self) -> str:
        """The name of its files, without a suffix."""
        return f"{self.name}-{self.variant}" if self.variant else self.name

    @property
    def heading(self) -> str:
        return f"{self.title}, {self.variant} specialists" if self.variant else self.title


Entries = Mapping[SetKey, Entry]  # cells of one row, by set


@dataclass(frozen=True)
class Comparison:
    """One row compared with another: over seeds, and over the test problems of all seeds."""

    group: str
    first: str
    second: str
    accuracy: PairedTest
    problems: McNemar
    mismatch: PairedTest | None


@dataclass(frozen=True)
class RowSummary:
    """The numbers of a row; accuracies and mismatches are shares, not percentages."""

    group: str
    label: str
    x: float | None
    accuracy: Mapping[str, Mean]  # by domain
    overall: Mean  # mean over domains
    untouched: Mapping[str, Mean]  # accuracy by domain, for domains without a source
    mismatch: Mean | None  # None if the routing is the source's by construction
    kl: Mean | None
    kl_layers: Mapping[str, Sequence[float]]  # by domain, mean over seeds
    by_seed: Mapping[int, float]  # overall accuracy
    against_first: Comparison | None  # None for the first row of a group


@dataclass(frozen=True)
class Summary:
    """A table with its means, errors and comparisons."""

    form: TableForm
    seeds: tuple[int, ...]
    problems: int  # of each domain
    rows: tuple[RowSummary, ...]
    comparisons: tuple[Comparison, ...]
    missing: tuple[str, ...]  # rows without a result

    def to_json(self) -> dict[str, Any]:
        values, form = asdict(self), self.form
        del values["form"]
        about = {"experiment": form.name, "title": form.title, "about": form.about}
        return {**about, **form.shared, **values}

    def row(self, group: str, label: str) -> RowSummary | None:
        return next((r for r in self.rows if (r.group, r.label) == (group, label)), None)


def summarise(
    form: TableForm,
    rows: Sequence[Row],
    keys: Sequence[SetKey],
    find: Callable[[SetKey, Cell], Entry | None],
) -> Summary:
    """Return the table of all cells that `find` finds; it lists missing rows."""
    measured = {
        row: {key: entry for key in keys if (entry := find(key, row.cell)) is not None}
        for row in rows
    }
    shown = [row for row in rows if measured[row]]
    firsts = {row.group: row for row in reversed(rows)}
    by_name = {(row.group, row.label): row for row in shown}

    def compare(first: Row | None, second: Row | None) -> Iterator[Comparison]:
        """Compare second with first on the sets that both were measured on, if there are any."""
        if first is not None and second is not None and first != second:
            one, other = measured[first], measured[second]
            pairs = [(one[key], other[key]) for key in one if key in other]
            if pairs:
                yield _comparison(first, second, pairs)

    some = next((measured[row] for row in shown), {})
    pairs = [
        (by_name.get((group, first)), by_name.get((group, second)))
        for group in dict.fromkeys(row.group for row in shown)
        for first, second in form.compare
    ]
    return Summary(
        form=form,
        seeds=tuple(sorted({key.seed for row in shown for key in measured[row]})),
        problems=next((d["problems"] for e in some.values() for d in e["domains"].values()), 0),
        rows=tuple(
            _row(row, measured[row], next(compare(firsts[row.group], row), None)) for row in shown
        ),
        comparisons=tuple(found for pair in pairs for found in compare(*pair)),
        missing=tuple(f"{r.group}, {r.label}" for r in rows if not measured[r]),
    )


def _row(row: Row, entries: Entries, against: Comparison | None) -> RowSummary:
    domains = row.cell.domains
    untouched = [entry.get("untouched", {}) for entry in entries.values()]
    shared = [domain for domain in untouched[0] if all(domain in own for own in untouched)]
    return RowSummary(
        group=row.group,
        label=row.label,
        x=row.x,
        accuracy={
            d: mean([e["domains"][d]["accuracy"] for e in entries.values()]) for d in domains
        },
        overall=mean([_overall(entry, "accuracy") for entry in entries.values()]),
        untouched={d: mean([own[d]["accuracy"] for own in untouched]) for d in shared},
        mismatch=_mean_of(entries, "mismatch"),
        kl=_mean_of(entries, "kl"),
        kl_layers={d: _layers(entries, d) for d in domains},
        by_seed={key.seed: _overall(entry, "accuracy") for key, entry in entries.items()},
        against_first=against,
    )


def _comparison(first: Row, second: Row, pairs: Sequence[tuple[Entry, Entry]]) -> Comparison:
    solved = [
        [
            bit
            for pair in pairs
            for domain in first.cell.domains
            for bit in unpack(pair[side]["domains"][domain]["solved"])
        ]
        for side in (0, 1)
    ]
    routed = all(_measures(entry, "mismatch") for pair in pairs for entry in pair)
    return Comparison(
        group=second.group,
        first=first.label,
        second=second.label,
        accuracy=_paired(pairs, "accuracy"),
        problems=mcnemar(*solved),
        mismatch=_paired(pairs, "mismatch") if routed else None,
    )


def _overall(entry: Mapping[str, Any], what: str) -> float:
    values = [domain[what] for domain in entry["domains"].values() if what in domain]
    return float(sum(values) / len(values))


def _mean_of(entries: Entries, what: str) -> Mean | None:
    if not all(_measures(entry, what) for entry in entries.values()):
        return None
    return mean([_overall(entry, what) for entry in entries.values()])


def _measures(entry: Mapping[str, Any], what: str) -> bool:
    """Return whether some domain has this measure; domains without a source have no routing
    measures.
    """
    return any(what in domain for domain in entry["domains"].values())


def _paired(pairs: Sequence[tuple[Any, Any]], what: str) -> PairedTest:
    first, second = ([_overall(pair[side], what) for pair in pairs] for side in (0, 1))
    return paired_t(first, second)


def _layers(entries: Entries, domain: str) -> list[float]:
    curves = [e["domains"][domain].get("kl_layers", []) for e in entries.values()]
    return [sum(layer) / len(curves) for layer in zip(*curves, strict=True)]
