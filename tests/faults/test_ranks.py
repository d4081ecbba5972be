"""A share of `python tests/faults/ranks.py`: ranks that are killed end the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from together import LIMIT


@pytest.mark.slow
@pytest.mark.timeout(LIMIT)
def test_killed_ranks_end_the_others_and_any_number_goes_on(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ranks.py")
    words = [sys.executable, str(script), "--kills", "1", "--verb", "refit"]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| refit |" in done.stdout
