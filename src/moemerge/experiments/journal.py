"""Measured cells of a study, one line each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemerge.errors import DataError
from moemerge.experiments.tables import Measurement, Repeat
from moemerge.runtime.journals import LineStore, read_lines

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
            _check_entry(entry, f"{self.path}, line {number}")
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


def _check_entry(entry: Mapping[str, Any], where: str) -> None:
    for name, kind in {"set": dict, "cell": str, "scale": dict}.items():
        if not isinstance(entry.get(name), kind):
            raise DataError(f"{where} is not a measured cell: {name!r} is missing", hint=CELLS_HINT)


def _text(of_set: Mapping[str, Any]) -> str:
    return json.dumps(of_set, sort_keys=True)
