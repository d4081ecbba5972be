"""A share of `make fuzz`, in a process of its own: this one has threads and must not fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fuzz import cases

RUN = Path(__file__).with_name("run.py")
COUNT = 14


def test_there_are_as_many_kinds_as_the_page_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    assert len(cases.KINDS) == 20
    assert "changes valid files of twenty kinds" in page.read_text(encoding="utf-8")


def test_hostile_files_of_every_kind_are_refused_and_valid_ones_are_not(tmp_path: Path) -> None:
    arguments = ("--count", str(COUNT), "--seed", "7", "--controls", "--seconds", "90")
    done = subprocess.run(
        [sys.executable, str(RUN), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
