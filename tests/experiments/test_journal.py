"""Cells on disk: read again as they were written, and noticed where they were not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moemerge.errors import DataError
from moemerge.experiments.cells import CELLS, CellJournal

SCALE = {"problems": 3}


@dataclass(frozen=True)
class OneSet:
    seed: int

    def to_json(self) -> dict[str, Any]:
        return {"seed": self.seed}


@dataclass(frozen=True)
class OneCell:
    name: str


def journal(folder: Path) -> CellJournal:
    return CellJournal(folder, SCALE)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    one = journal(tmp_path)
    for seed, name in ((0, "linear"), (0, "a line\u2028and another"), (1, "linear")):
        one.add(OneSet(seed), OneCell(name), {"score": 0.1 + seed})  # type: ignore[arg-type]
    return tmp_path


def score(folder: Path, seed: int, name: str = "linear") -> Any:
    entry = journal(folder).get(OneSet(seed), OneCell(name))  # type: ignore[arg-type]
    return None if entry is None else entry["score"]


def test_cells_are_read_again(written: Path) -> None:
    assert score(written, 0) == 0.1
    assert score(written, 1) == 1.1
    assert score(written, 0, "a line\u2028and another") == 0.1
    assert CellJournal(written, {"problems": 4}).get(OneSet(0), OneCell("linear")) is None  # type: ignore[arg-type]


def test_lines_without_a_digest_are_taken_as_they_are(tmp_path: Path) -> None:
    line = {"set": {"seed": 0}, "cell": "linear", "scale": SCALE, "score": 0.5}
    (tmp_path / CELLS).write_text(json.dumps(line) + "\n")
    assert score(tmp_path, 0) == 0.5


@pytest.mark.parametrize("line", ["[1]", "{}", '{"set": 1, "cell": "a", "scale": {}}'])
def test_a_line_that_is_no_cell(tmp_path: Path, line: str) -> None:
    (tmp_path / CELLS).write_text(line + "\n")
    with pytest.raises(DataError, match="line 1"):
        journal(tmp_path)
