"""A small share of `make fuzz`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.fuzz import cases

ROOT = Path(__file__).parents[2]


def test_the_page_states_the_number_of_kinds() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"{len(cases.KINDS)} kinds of cases" in page


@pytest.mark.parametrize(
    "chosen",
    [("--count", "12"), pytest.param(("--count", "38", "--controls"), marks=pytest.mark.slow)],
    ids=["some", "every kind, and valid files"],
)
def test_hostile_files_are_refused_and_valid_ones_are_not(
    chosen: tuple[str, ...], tmp_path: Path
) -> None:
    """In a separate process: this one has threads and must not fork."""
    arguments = (*chosen, "--seed", "7", "--seconds", "90")
    done = subprocess.run(
        [sys.executable, "-m", "tools.fuzz.run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
