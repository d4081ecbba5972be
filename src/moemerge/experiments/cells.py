"""From wanted cells to work items: models in the order they need each other, measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from moemerge.errors import MoeMergeError
from moemerge.experiments.journal import CellJournal
from moemerge.experiments.tables import Measurement, Repeat
from moemerge.experiments.work import Outcome, Workers, WorkItem, run_work
from moemerge.runtime.progress import Progress


class Node(Protocol):
    """A model or text that is made of others. Equal nodes are made once."""

    @property
    def name(self) -> str: ...

    @property
    def parents(self) -> tuple[Any, ...]: ...


N = TypeVar("N", contravariant=True)
C = TypeVar("C", contravariant=True)


class Workbench(Protocol[N, C]):
    """Where the nodes and cells of one set are worked on; sent to worker processes."""

    def is_given(self, node: N) -> bool:
        """Whether it is there from the start, and never ours to remove."""
        ...

    @property
    def measuring(self) -> float:
        """How urgent a measurement is, on the scale of `urgency`."""
        ...

    def urgency(self, node: N) -> float:
        """Of two items that are ready, the more urgent goes first."""
        ...

    def prepare(self) -> None:
        """What everything else waits for."""
        ...

    def make(self, node: N) -> Any: ...

    def remove(self, node: N) -> None:
        """Take what nothing needs any more off the disk."""
        ...

    def nodes(self, cell: C) -> tuple[Any, ...]:
        """All that must exist for a measurement."""
        ...

    def measure(self, cell: C) -> dict[str, Any]: ...


@dataclass(frozen=True)
class SetCells:
    """The cells that one set still lacks."""

    key: Repeat
    bench: Workbench[Any, Any]
    cells: Sequence[Any]


@dataclass(frozen=True)
class Failure:
    """A cell or a model that could not be made."""

    what: str
    why: str


def run_cells(
    batches: Sequence[SetCells], journal: CellJournal, workers: Workers, progress: Progress
) -> list[Failure]:
    """Make and measure every cell, and note it in the journal."""
    items: list[WorkItem] = []
    for number, batch in enumerate(batches):
        items += work_of(batch, number)
    measured = sum(item.call is _measure for item in items)
    if not measured:
        return []
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
    """What everything waits for first, then nodes in the order they need each other, and cells.

    Sets are worked on one after the other, so that what a killed run leaves is of use.
    """
    bench, name = batch.bench, batch.key.name
    first = f"{name}: prepare"
    yield WorkItem(first, bench.prepare, (), rank=(number, 0))
    made: dict[Any, WorkItem] = {}

    def make(node: Any) -> str:
        """The item that makes a node, and the items of what it needs."""
        if bench.is_given(node):
            return first
        if node not in made:
            after = tuple(dict.fromkeys([first, *(make(parent) for parent in node.parents)]))
            words, rank = f"{name}: make {node.name}", (number, -bench.urgency(node))
            if any(item.key == words for item in made.values()):  # as in another seed
                words += f" ({len(made)})"
            made[node] = WorkItem(words, bench.make, (node,), after, _remover(bench, node), rank)
        return made[node].key

    for cell in batch.cells:
        after = tuple(dict.fromkeys([first, *(make(node) for node in bench.nodes(cell))]))
        words = f"{name}: measure {cell.name}"
        yield WorkItem(
            words, _measure, (bench, batch.key, cell), after, rank=(number, -bench.measuring)
        )
    yield from made.values()


def _remover(bench: Workbench[Any, Any], node: Any) -> Any:
    return lambda: bench.remove(node)


def _measure(
    bench: Workbench[Any, Any], key: Repeat, cell: Any
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
        return []  # told with the item that it waited for
    why = str(error) if isinstance(error, MoeMergeError) else f"{type(error).__name__}: {error}"
    progress.note(f"failed: {item.key}: {why}")
    return [Failure(item.key, why)]
