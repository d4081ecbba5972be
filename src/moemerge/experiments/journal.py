"""Finished cells, one line each: what a study has measured so far."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moemerge.errors import DataError
from moemerge.experiments.tables import Measurement, Repeat
from moemerge.runtime.files import write_whole

CELLS = "cells.jsonl"
TASKS = "tasks.jsonl"

Key = tuple[str, str]  # a set, a cell's name


class CellJournal:
    """The cells of one output folder, measured at one scale."""

    def __init__(self, folder: Path, scale: Mapping[str, Any]) -> None:
        self.path = folder / CELLS
        self._scale = dict(scale)
        self._found: dict[Key, dict[str, Any]] = {}
        for entry in self._entries():
            if entry["scale"] == self._scale:
                self._found[_text(entry["set"]), entry["cell"]] = entry

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
        write_whole(self.path, "".join(whole).encode())

    def add(self, key: Repeat, cell: Measurement, result: Mapping[str, Any]) -> None:
        """Note a finished cell; it is on disk when this returns."""
        entry = {"set": key.to_json(), "cell": cell.name, "scale": self._scale, **result}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._found[_text(key.to_json()), cell.name] = entry

    def add_task(self, key: str, seconds: float, cpu_seconds: float) -> None:
        """Note what a task took; nothing depends on it, but it tells where the time goes."""
        entry = {"task": key, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
        with self.path.with_name(TASKS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def has(self, key: Repeat, cell: Measurement, **made_of: str | None) -> bool:
        """Whether a cell was measured, and of the same things; None stands for any."""
        entry = self.get(key, cell)
        return entry is not None and all(
            digest in (None, entry.get(what)) for what, digest in made_of.items()
        )

    def get(self, key: Repeat, cell: Measurement) -> dict[str, Any] | None:
        return self._found.get((_text(key.to_json()), cell.name))


def _text(of_set: Mapping[str, Any]) -> str:
    return json.dumps(of_set, sort_keys=True)
