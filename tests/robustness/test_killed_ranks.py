"""A small share of `python -m tools.faults.ranks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from together import LIMIT


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_a_killed_rank_ends_the_others_and_any_number_resumes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.faults.ranks", "--kills", "1", "--verb", "refit"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| refit |" in done.stdout
