"""The cells of a study: measured ones on disk, and work items for those that are missing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from moemerge.errors import DataError, MoeMergeError
from moemerge.lab.experiments.tables import Measurement, Repeat
from moemerge.lab.experiments.work import Outcome, Workers, WorkItem, run_work
from moemerge.runtime.journals import LineStore, read_lines
from moemerge.runtime.progress import Progress

CELLS = "cells.jsonl"
SECONDS = "tasks.jsonl"  # the time of each work item
CELLS_HINT = "remove the line, or the file"


class CellJournal:
    """The cells of one output folder, measured at one scale.

    Reading takes no lock. The files are locked from the first `add` or `open` until `close`.
    """

    def __init__(self, folder: Path, scale: Mapping[str, Any]) -> None:
        self.path = folder / CELLS
        self._scale = dict(scale)
        self._found: dict[tuple[str, str], dict[str, Any]] = {}  # by set and cell name
        self._store: LineStore | None = None
        self._timings: LineStore | None = None
        for number, entry in enumerate(read_lines(self.path, None, CELLS_HINT), 1):
            for name, kind in {"set": dict, "cell": str, "scale": dict}.items():
                if not isinstance(entry.get(name), kind):
                    where = f"{self.path}, line {number}"
                    problem = f"{where} is not a measured cell: {name!r} is missing"
                    raise DataError(problem, hint=CELLS_HINT)
            if entry["scale"] == self._scale:
                self._found[_text(entry["set"]), entry["cell"]] = entry

    def open(self) -> LineStore:
        """Lock the file of cells; refuse if another run is writing it."""
        if self._store is None:
            self._store = LineStore(self.path, None, durable=True, hint=CELLS_HINT)
        return self._store

    def close(self) -> None:
        for store in (self._store, self._timings):
            if store is not None:
                store.close()
        self._store = self._timings = None

    def add(self, key: Repeat, cell: Measurement, result: Mapping[str, Any]) -> None:
        """Store a finished cell. It is synced to disk when this returns."""
        entry = {"set": key.to_json(), "cell": cell.name, "scale": self._scale, **result}
        self.open().add(entry)
        self._found[_text(key.to_json()), cell.name] = entry

    def add_seconds(self, key: str, seconds: float, cpu_seconds: float) -> None:
        """Store the time of a work item. No result depends on it."""
        if self._timings is None:
            self._timings = LineStore(self.path.with_name(SECONDS), None, hint=CELLS_HINT)
        self._timings.add(
            {"task": key, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
        )

    def has(self, key: Repeat, cell: Measurement, **made_of: str | None) -> bool:
        """Return whether a cell was measured from inputs with these digests; None matches any."""
        entry = self.get(key, cell)
        return entry is not None and all(
            digest in (None, entry.get(what)) for what, digest in made_of.items()
        )

    def get(self, key: Repeat, cell: Measurement) -> dict[str, Any] | None:
        return self._found.get((_text(key.to_json()), cell.name))


def _text(of_set: Mapping[str, Any]) -> str:
    return json.dumps(of_set, sort_keys=True)


class Workbench(Protocol):
    """Makes the nodes and measures the cells of one set; sent to worker processes."""

    def prepare(self) -> None:
        """Do the work that must finish before any other item starts."""
        ...

    def make(self, node: Any) -> Any: ...

    def remove(self, node: Any) -> None:
        """Delete a node that no other item needs."""
        ...

    def measure(self, cell: Any) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SetCells:
    """The missing cells of one set."""

    key: Repeat
    bench: Workbench
    cells: Sequence[Any]
    # The urgency of a measurement on the scale of the nodes'; the most urgent item runs first. A
    # model can be deleted after its measurement, which frees disk space.
    urgency: float = math.inf


@dataclass(frozen=True)
class Failure:
    """A cell or a model that could not be made."""

    what: str
    why: str


def run_cells(
    batches: Sequence[SetCells], journal: CellJournal, workers: Workers, progress: Progress
) -> list[Failure]:
    """Make and measure every cell, and store it in the journal."""
    items = [item for number, batch in enumerate(batches) for item in work_of(batch, number)]
    measured = sum(item.call is _measure for item in items)
    failures: list[Failure] = []
    journal.open()
    try:
        progress.start("measuring", measured, unit="cells")
        for outcome in run_work(items, workers):
            failures += _note(outcome, journal, progress)
        progress.finish()
    finally:
        journal.close()
    return failures


def work_of(batch: SetCells, number: int) -> Iterator[WorkItem]:
    """Yield the preparation, then nodes in dependency order, and cells.

    Sets run one after the other, so that a killed run leaves complete sets.
    """
    bench, name = batch.bench, batch.key.name
    first = f"{name}: prepare"
    yield WorkItem(first, bench.prepare, (), rank=(number, 0))
    made: dict[Any, WorkItem] = {}

    def make(node: Any) -> str:
        """Return the key of the item that makes a node, after those it depends on."""
        if node.is_given:
            return first
        if node not in made:
            after = tuple(dict.fromkeys([first, *(make(parent) for parent in node.parents)]))
            words, rank = f"{name}: make {node.name}", (number, -node.urgency)
            if any(item.key == words for item in made.values()):  # the same node in another seed
                words += f" ({len(made)})"
            made[node] = WorkItem(
                words, bench.make, (node,), after, partial(bench.remove, node), rank
            )
        return made[node].key

    for cell in batch.cells:
        after = tuple(dict.fromkeys([first, *(make(node) for node in cell.nodes)]))
        words, rank = f"{name}: measure {cell.name}", (number, -batch.urgency)
        yield WorkItem(words, _measure, (bench, batch.key, cell), after, rank=rank)
    yield from made.values()


def _measure(
    bench: Workbench, key: Repeat, cell: Any
) -> tuple[Repeat, Measurement, Mapping[str, Any]]:
    return key, cell, bench.measure(cell)


def _note(outcome: Outcome, journal: CellJournal, progress: Progress) -> list[Failure]:
    item = outcome.item
    is_cell = item.call is _measure
    if is_cell:
        progress.advance(1)
    if outcome.error is None:
        journal.add_seconds(item.key, outcome.seconds, outcome.cpu_seconds)
        if is_cell:
            journal.add(*outcome.result)
        return []
    error = outcome.error
    if isinstance(error, str):
        return []  # reported with the item that it waited for
    why = str(error) if isinstance(error, MoeMergeError) else f"{type(error).__name__}: {error}"
    progress.note(f"failed: {item.key}: {why}")
    return [Failure(item.key, why)]
