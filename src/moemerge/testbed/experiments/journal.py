"""Finished cells, one JSON line each: what a run that goes on, or is repeated, need not redo."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moemerge.errors import DataError
from moemerge.testbed.experiments.bench import Scale
from moemerge.testbed.experiments.recipes import Cell, SetKey
from moemerge.testbed.training.sets import MANIFEST

CELLS = "cells.jsonl"
TASKS = "tasks.jsonl"

Key = tuple[str, str]  # a set's name, a cell's name


def set_digest(trained: Path) -> str:
    """Tells one training of a set from another: its manifest has settings, losses and the date."""
    return hashlib.sha256((trained / MANIFEST).read_bytes()).hexdigest()[:16]


class CellJournal:
    """The cells of one output folder, measured at one scale."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.path = folder / CELLS
        self._scale = asdict(scale)
        self._found: dict[Key, dict[str, Any]] = {}
        for entry in self._entries():
            if entry["scale"] == self._scale:
                key = SetKey(**entry["set"])
                self._found[key.name, entry["cell"]] = entry

    def _entries(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError:
                if number == len(lines) and not line.endswith("\n"):
                    self._cut(lines[:-1])  # a run was killed while it wrote this line
                    return
                raise DataError(
                    f"{self.path}, line {number}: not JSON", hint="remove the line, or the file"
                ) from None

    def _cut(self, whole: list[str]) -> None:
        self.path.write_text("".join(whole), encoding="utf-8")

    def add(self, key: SetKey, cell: Cell, result: Mapping[str, Any]) -> None:
        """Note a finished cell; it is on disk when this returns."""
        entry = {"set": key.to_json(), "cell": cell.name, "scale": self._scale, **result}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._found[key.name, cell.name] = entry

    def add_task(self, key: str, seconds: float, cpu_seconds: float) -> None:
        """Note what a task took; nothing depends on it, but it tells where the time goes."""
        entry = {"task": key, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
        with self.path.with_name(TASKS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def has(self, key: SetKey, cell: Cell, digest: str | None) -> bool:
        """Whether a cell was measured on the set with this digest; None stands for any set."""
        entry = self.get(key, cell)
        return entry is not None and digest in (None, entry.get("trained"))

    def get(self, key: SetKey, cell: Cell) -> dict[str, Any] | None:
        return self._found.get((key.name, cell.name))
