"""A small share of the hostile cases of tools/fuzz."""

from pathlib import Path

import pytest

from processes import environment, python

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "chosen",
    [("--count", "12"), pytest.param(("--count", "35", "--controls"), marks=pytest.mark.slow)],
    ids=["some", "every kind, and valid files"],
)
def test_hostile_files_are_refused_and_valid_ones_are_not(chosen, tmp_path, monkeypatch):
    """In a separate process: this one has threads and must not fork."""
    monkeypatch.chdir(ROOT)
    done = python(
        "from tools.fuzz.run import main; raise SystemExit(main())",
        *(*chosen, "--seed", "7", "--seconds", "90"),
        env=environment(TMPDIR=str(tmp_path)),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
