"""Summarise finished cells as tables: means, and comparisons paired over seeds or problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moemerge.lab.evaluation.report import PairedDifference, TaskScores, compare_models
from moemerge.lab.evaluation.settings import EvaluationSettings
from moemerge.lab.evaluation.significance import (
    McNemar,
    Mean,
    PairedTest,
    mcnemar,
    mean,
    paired_t,
    weighted_mean,
)
from moemerge.lab.evaluation.text_losses import LossDifference, compare_losses
from moemerge.lab.experiments.settings import BASE
from moemerge.lab.experiments.tables import REFERENCE, Measurement, Repeat, Row, TableForm

if TYPE_CHECKING:
    from moemerge.forward.losses import DocumentLosses

DRAWS: int = EvaluationSettings.model_fields["draws"].default
SEED = 0
CellEntry = Mapping[str, Any]


def pack(solved: Sequence[bool]) -> str:
    """Pack one bit per problem into hexadecimal digits."""
    bits = "".join("1" if value else "0" for value in solved)
    return f"{int('1' + bits, 2):x}"  # the leading 1 preserves leading zeros


def unpack(text: str) -> list[bool]:
    """Undo `pack`."""
    return [bit == "1" for bit in f"{int(text, 16):b}"[1:]]


def packed(scores: Sequence[float]) -> dict[str, Any]:
    """Return the scores of one task in the journal's format."""
    if all(score in (0.0, 1.0) for score in scores):
        return {"solved": pack([score == 1.0 for score in scores])}
    return {"scores": list(scores)}


def scores_of(task: CellEntry) -> list[float]:
    """Undo `packed`."""
    if "solved" in task:
        return [float(bit) for bit in unpack(task["solved"])]
    return [float(score) for score in task["scores"]]


def overall_by_problems(form: TableForm, entry: CellEntry) -> Mean:
    """Return the mean of the domains' averages, with its standard error over problems."""
    means, weights = [], []
    domains = [domain for domain in form.domains if domain in entry["domains"]]
    for domain in domains:
        tasks = entry["domains"][domain]["tasks"]
        means += [mean(scores_of(tasks[task])) for task in form.tasks[domain]]
        weights += [1 / (len(domains) * len(tasks))] * len(tasks)
    return weighted_mean(weights, means)


def pooled(form: TableForm, entries: Sequence[CellEntry]) -> CellEntry:
    """Combine the entries of several seeds: a problem's score is its mean over seeds."""
    if len(entries) == 1:
        return entries[0]
    domains: dict[str, Any] = {}
    for domain in (d for d in form.domains if all(d in e["domains"] for e in entries)):
        tasks: dict[str, Any] = {}
        for name in form.tasks[domain]:
            rows = [scores_of(entry["domains"][domain]["tasks"][name]) for entry in entries]
            tasks[name] = {"scores": np.mean(rows, axis=0).tolist()}
        domains[domain] = {"tasks": tasks}
    return {"domains": domains}


def paired_by_problems(
    form: TableForm, first: CellEntry, second: CellEntry
) -> PairedDifference | None:
    """Compare second with first over the domains that both have; None if there is none."""
    shared = [d for d in form.domains if d in first["domains"] and d in second["domains"]]
    tasks = []
    for domain in shared:
        for name, title in form.tasks[domain].items():
            rows = [scores_of(e["domains"][domain]["tasks"][name]) for e in (first, second)]
            places = tuple(map(str, range(len(rows[0]))))
            single = all(score in (0.0, 1.0) for row in rows for score in row)
            tasks.append(TaskScores(name, title, domain, places, np.array(rows), single))
    if not tasks:
        return None
    rows_of = compare_models(tasks, ["first", "second"], draws=DRAWS, seed=SEED)
    kinds = {row.kind: row for row in rows_of}
    whole = kinds.get("overall") or kinds.get("domain") or kinds["task"]
    return whole.pairs[0]


Entries = Mapping[Repeat, CellEntry]  # cells of one row, by set
FindEntry = Callable[[Repeat, Measurement], CellEntry | None]


@dataclass(frozen=True)
class Comparison:
    """One row compared with another: over seeds, and over the test problems of all seeds."""

    group: str
    first: str
    second: str
    accuracy: PairedTest
    problems: McNemar | None  # None if a problem has several samples
    mismatch: PairedTest | None
    paired: PairedDifference | None = None  # if the table is paired by problems


@dataclass(frozen=True)
class TextSummary:
    """The next-token loss on a plain text in nats, its error over documents, and the difference to
    the control (without one, to the first row of the group)."""

    loss: Mean
    difference: LossDifference | None


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
    any_mismatch: Mean | None
    kl: Mean | None
    kl_layers: Mapping[str, Sequence[float]]  # by domain, mean over seeds
    by_seed: Mapping[int, float]  # overall accuracy
    against_first: Comparison | None  # None for the first row of a group
    tasks: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by domain
    against_control: Comparison | None = None  # None for the control and without one
    perplexity: Mapping[str, TextSummary] = field(default_factory=dict)  # by text


@dataclass(frozen=True)
class Summary:
    """A table with its means, errors and comparisons."""

    form: TableForm
    seeds: tuple[int, ...]
    problems: int  # of each domain
    rows: tuple[RowSummary, ...]
    comparisons: tuple[Comparison, ...]
    missing: tuple[str, ...]  # rows without a result
    # Every merged row compared with the base, and with the best source of the reference rows.
    references: tuple[Comparison, ...] = ()

    @property
    def name(self) -> str:
        return self.form.file

    def to_json(self) -> dict[str, Any]:
        values, form = asdict(self), self.form
        del values["form"]
        about = {"experiment": form.name, "title": form.title, "about": form.about}
        return {**about, **form.shared, **values}

    def row(self, group: str, label: str) -> RowSummary | None:
        return next((r for r in self.rows if (r.group, r.label) == (group, label)), None)

    @property
    def groups(self) -> dict[str, list[RowSummary]]:
        groups: dict[str, list[RowSummary]] = {}
        for row in self.rows:
            groups.setdefault(row.group, []).append(row)
        return groups


def summarise(
    form: TableForm, rows: Sequence[Row[Measurement]], keys: Sequence[Repeat], find: FindEntry
) -> Summary:
    """Return the table of all cells that `find` finds; it lists missing rows."""
    measured = {
        row: {key: entry for key in keys if (entry := find(key, row.cell)) is not None}
        for row in rows
    }
    return _Summariser(form, rows, measured).summary()


@dataclass(frozen=True)
class _Summariser:
    """All rows of a table, and the measured cells of each by set."""

    form: TableForm
    rows: Sequence[Row[Measurement]]
    measured: Mapping[Row[Measurement], Entries]

    def summary(self) -> Summary:
        shown = [row for row in self.rows if self.measured[row]]
        some = next((self.measured[row] for row in shown), {})
        firsts: dict[str, Row[Measurement]] = {}
        controls: dict[str, Row[Measurement]] = {}
        for row in self.rows:
            firsts.setdefault(row.group, row)
            if self.form.control and row.group != REFERENCE:
                # A plain average has no control row: its routers are averaged already.
                is_control = row.label == self.form.control
                controls[row.group] = row if is_control else controls.get(row.group, row)
        return Summary(
            form=self.form,
            seeds=tuple(sorted({key.seed for row in shown for key in self.measured[row]})),
            problems=next((d["problems"] for e in some.values() for d in e["domains"].values()), 0),
            rows=tuple(
                self.row(row, firsts[row.group], controls.get(row.group, row)) for row in shown
            ),
            comparisons=tuple(self.comparisons(shown)),
            missing=tuple(f"{r.group}, {r.label}" for r in self.rows if not self.measured[r]),
            references=tuple(self.references(shown)),
        )

    def row(
        self, row: Row[Measurement], first: Row[Measurement], control: Row[Measurement]
    ) -> RowSummary:
        """Return a row, compared with the first row and the control of its group."""
        domains, entries = row.cell.domains, self.measured[row]
        reference = self.measured[control if self.form.control else first]
        against = [
            None if other is row else next(self.compare(other, row), None)
            for other in (first, control)
        ]
        return RowSummary(
            group=row.group,
            label=row.label,
            x=row.x,
            accuracy={
                d: mean([e["domains"][d]["accuracy"] for e in entries.values()]) for d in domains
            },
            overall=_mean_accuracy(self.form, entries),
            untouched=_untouched(entries),
            mismatch=_mean_of(entries, "mismatch"),
            any_mismatch=_mean_of(entries, "any_mismatch"),
            kl=_mean_of(entries, "kl"),
            kl_layers={d: _layers(entries, d) for d in domains},
            by_seed={key.seed: _overall(entry, "accuracy") for key, entry in entries.items()},
            against_first=against[0],
            tasks=_tasks(self.form, entries),
            against_control=against[1],
            perplexity=_perplexity(entries, reference),
        )

    def comparisons(self, rows: Sequence[Row[Measurement]]) -> Iterator[Comparison]:
        by_name = {(row.group, row.label): row for row in rows}
        for group in dict.fromkeys(row.group for row in rows):
            for labels in self.form.compare:
                first, second = (by_name.get((group, label)) for label in labels)
                if first is not None and second is not None:
                    yield from self.compare(first, second)

    def references(self, rows: Sequence[Row[Measurement]]) -> Iterator[Comparison]:
        """Compare every merged row with the base, and with the best of the single sources."""
        names = self.form.singles
        singles = {r.label: r for r in rows if r.group == REFERENCE and r.label in names}
        base = singles.pop(BASE, None)
        sources = [singles[name] for name in names if name in singles]
        best = max(
            sources, key=lambda r: _mean_accuracy(self.form, self.measured[r]).value, default=None
        )
        for other in (base, best):
            for row in rows:
                if other is not None and row.group != REFERENCE:
                    yield from self.compare(other, row)

    def compare(self, first: Row[Measurement], second: Row[Measurement]) -> Iterator[Comparison]:
        """Compare second with first on the sets that both were measured on, if there are any."""
        one, other = self.measured[first], self.measured[second]
        pairs = [(one[key], other[key]) for key in one if key in other]
        if not pairs:
            return
        problems = paired = None
        if self.form.paired_by == "problems":
            sides = [pooled(self.form, side) for side in zip(*pairs, strict=True)]
            paired = paired_by_problems(self.form, *sides)
        else:
            problems = _mcnemar(pairs, first.cell.domains)
        routed = all(_measures(entry, "mismatch") for pair in pairs for entry in pair)
        yield Comparison(
            group=second.group,
            first=first.label,
            second=second.label,
            accuracy=_paired(pairs, "accuracy"),
            problems=problems,
            mismatch=_paired(pairs, "mismatch") if routed else None,
            paired=paired,
        )


def _perplexity(entries: Entries, reference: Entries) -> dict[str, TextSummary]:
    """Return the loss on each text, compared with that of a reference on the same documents."""
    own, others = _document_losses(entries), _document_losses(reference)
    found = {}
    for name, losses in own.items():
        other = others.get(name)
        pair = None
        if other is not None and other.tokens == losses.tokens and other.sums != losses.sums:
            both = {"reference": other, "row": losses}
            rng = np.random.default_rng(SEED)
            (pair,) = compare_losses(name, both, list(both), DRAWS, rng).pairs
        mean_loss = losses.mean
        found[name] = TextSummary(Mean(mean_loss.value, mean_loss.error, len(losses.sums)), pair)
    return found


def _document_losses(entries: Entries) -> dict[str, DocumentLosses]:
    """Return the losses by text; a document's loss is its mean over seeds."""
    from moemerge.forward.losses import DocumentLosses  # imports torch

    seeds = [entry.get("perplexity", {}) for entry in entries.values()]
    found = {}
    for name in seeds[0] if seeds else ():
        if all(name in own and own[name]["tokens"] == seeds[0][name]["tokens"] for own in seeds):
            sums = np.mean([own[name]["sums"] for own in seeds], axis=0).tolist()
            found[name] = DocumentLosses(tuple(sums), tuple(seeds[0][name]["tokens"]))
    return found


def _mean_accuracy(form: TableForm, entries: Entries) -> Mean:
    """Return the mean over seeds; with a single seed and pairing by problems, over problems."""
    if form.paired_by == "problems" and len(entries) == 1:
        (entry,) = entries.values()
        return overall_by_problems(form, entry)
    return mean([_overall(entry, "accuracy") for entry in entries.values()])


def _tasks(form: TableForm, entries: Entries) -> dict[str, dict[str, float]]:
    """Return the means over seeds by task."""
    asked = [entry["domains"] for entry in entries.values()]

    def score(domain: str, task: str) -> float:
        return mean([own[domain]["tasks"][task]["accuracy"] for own in asked]).value

    return {
        domain: {task: score(domain, task) for task in tasks}
        for domain, tasks in form.tasks.items()
        if domain in asked[0]
    }


def _mcnemar(pairs: Sequence[tuple[Any, Any]], domains: Sequence[str]) -> McNemar:
    """Return McNemar's test over the problems of all sets."""
    solved: tuple[list[bool], list[bool]] = ([], [])
    for pair in pairs:
        for side, entry in zip(solved, pair, strict=True):
            for domain in domains:
                side += unpack(entry["domains"][domain]["solved"])
    return mcnemar(*solved)


def _overall(entry: Mapping[str, Any], what: str) -> float:
    values = [domain[what] for domain in entry["domains"].values() if what in domain]
    return float(sum(values) / len(values))


def _mean_of(entries: Entries, what: str) -> Mean | None:
    if not all(_measures(entry, what) for entry in entries.values()):
        return None
    return mean([_overall(entry, what) for entry in entries.values()])


def _untouched(entries: Entries) -> dict[str, Mean]:
    """Return the accuracy on the domains without a source that all sets have."""
    asked = [entry.get("untouched", {}) for entry in entries.values()]
    shared = [domain for domain in asked[0] if all(domain in own for own in asked)]
    return {domain: mean([own[domain]["accuracy"] for own in asked]) for domain in shared}


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
