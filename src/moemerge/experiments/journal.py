"""Finished cells, one line each: what a study has measured so far.

Each line carries a digest of itself, so that one which was changed is noticed; lines of earlier
versions have none, and are taken as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moemerge.errors import DataError
from moemerge.experiments.tables import Measurement, Repeat
from moemerge.runtime.files import parse_object, write_whole
from moemerge.runtime.journals import DIGEST, line_digest

CELLS = "cells.jsonl"
SECONDS = "tasks.jsonl"  # what each work item took
HINT = "remove the line, or the file"

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
        content = self.path.read_bytes()
        *lines, half = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            yield self._entry(line, f"{self.path}, line {number}")
        if half:  # a run was killed while it wrote this line
            write_whole(self.path, content[: -len(half)])

    def _entry(self, line: bytes, where: str) -> dict[str, Any]:
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8", hint=HINT) from error
        entry = parse_object(text, where, HINT, DataError, halves=True)
        digest = entry.pop(DIGEST, None)
        if digest is not None and digest != line_digest(entry):
            raise DataError(f"{where} is not as it was written", hint=HINT)
        kinds = {"set": dict, "cell": str, "scale": dict}
        for name, kind in kinds.items():
            if not isinstance(entry.get(name), kind):
                raise DataError(f"{where} is no measured cell: {name!r} is missing", hint=HINT)
        return entry

    def add(self, key: Repeat, cell: Measurement, result: Mapping[str, Any]) -> None:
        """Note a finished cell; it is on disk when this returns."""
        entry = {"set": key.to_json(), "cell": cell.name, "scale": self._scale, **result}
        line = json.dumps({**entry, DIGEST: line_digest(entry)}, ensure_ascii=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self._found[_text(key.to_json()), cell.name] = entry

    def add_seconds(self, key: str, seconds: float, cpu_seconds: float) -> None:
        """Note what a work item took; nothing depends on it, but it tells where the time goes."""
        entry = {"task": key, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
        with self.path.with_name(SECONDS).open("a", encoding="utf-8") as file:
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
