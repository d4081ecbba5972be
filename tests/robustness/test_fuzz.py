"""A small share of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import environment, python
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
    chosen: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a separate process: this one has threads and must not fork."""
    monkeypatch.chdir(ROOT)
    done = python(
        "from tools.fuzz.run import main; raise SystemExit(main())",
        *(*chosen, "--seed", "7", "--seconds", "90"),
        env=environment(TMPDIR=str(tmp_path)),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
