"""Measured cells on disk, and worker processes that measure missing ones."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.cells import Bench, Cell, SetKey
from moemerge.runtime.progress import Progress

CELLS = "cells.jsonl"


class CellJournal:
    """The cells of one output folder, measured at one scale: a line of JSON for each."""

    def __init__(self, folder: Path, scale: Mapping[str, Any]) -> None:
        self.path = folder / CELLS
        self._scale = dict(scale)
        self._found: dict[tuple[SetKey, str], dict[str, Any]] = {}
        self.read()

    def read(self) -> None:
        """Read the cells that other processes have added, too."""
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                if entry["scale"] == self._scale:
                    self._found[SetKey(**entry["set"]), entry["cell"]] = entry

    def add(self, key: SetKey, cell: Cell, result: Mapping[str, Any]) -> None:
        entry = {"set": key.to_json(), "cell": cell.name, "scale": self._scale, **result}
        with self.path.open("a", encoding="utf-8") as file:  # workers append whole lines
            file.write(json.dumps(entry) + "\n")
        self._found[key, cell.name] = entry

    def get(self, key: SetKey, cell: Cell) -> dict[str, Any] | None:
        return self._found.get((key, cell.name))

    def has(self, key: SetKey, cell: Cell, trained: str | None) -> bool:
        """Return whether a cell was measured with this training of the set; None is any."""
        entry = self.get(key, cell)
        return entry is not None and trained in (None, entry["trained"])


@dataclass(frozen=True)
class SetCells:
    """The missing cells of one set."""

    key: SetKey
    bench: Bench
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Failure:
    """A cell that could not be measured."""

    what: str
    why: str


def run_cells(
    batches: Sequence[SetCells], journal: CellJournal, jobs: int, progress: Progress
) -> list[Failure]:
    """Measure every cell: a set at a time, and `jobs` sets in parallel."""
    failures: list[Failure] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawn) as pool:
        done = map if jobs == 1 else pool.map
        for found in done(_run_set, batches, [journal] * len(batches)):
            for failure in found:
                progress.note(f"failed: {failure.what}: {failure.why}")
            failures += found
    journal.read()
    return failures


def _run_set(batch: SetCells, journal: CellJournal) -> list[Failure]:
    """Measure the cells of a set; each merge is made once, and removed after its last cell."""
    users = Counter(node for cell in batch.cells for node in cell.nodes)
    failures = []
    batch.bench.prepare()
    for cell in batch.cells:
        try:
            for node in cell.nodes:
                batch.bench.make(node)
            journal.add(batch.key, cell, batch.bench.measure(cell))
        except Exception as error:  # the other cells are measured all the same
            failures.append(Failure(f"{batch.key.name}: {cell.name}", str(error)))
        users.subtract(cell.nodes)
        for node in cell.nodes:
            if not users[node]:
                batch.bench.remove(node)
    return failures
