"""What a long job shows where no bar can be drawn."""

from __future__ import annotations

import builtins
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from moemerge import cli
from moemerge.cli import console
from moemerge.cli.console import interruptible
from moemerge.cli.repairs import remaining_work
from moemerge.runtime.journals import journal_path


def run(*amounts: int, total: int, unit: str, quiet: bool = False) -> None:
    with console.progress(quiet=quiet) as bar:
        bar.start("reading", total, unit=unit)
        for amount in amounts:
            bar.advance(amount)


def test_a_log_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    run(0, 3, 1, total=8, unit="steps")
    run(1_500_000, total=3_000_000, unit="B")
    assert capsys.readouterr().err.splitlines() == [
        "reading: 3 of 8 steps",
        "reading: 4 of 8 steps, 0:00:00 left",
        "reading: 1.5 MB of 3.0 MB",
    ]


def test_the_time_left_does_not_count_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 0.0, 30.0, 40.0, 70.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(times))
    run(1, 1, 3, total=8, unit="layers")  # 30 seconds to load, then 10 for each layer
    assert capsys.readouterr().err.splitlines() == [
        "reading: 1 of 8 layers",
        "reading: 5 of 8 layers, 0:00:30 left",
    ]


def test_a_short_job_leaves_none(capsys: pytest.CaptureFixture[str]) -> None:
    run(3, 1, total=8, unit="steps")
    assert capsys.readouterr().err == ""


def test_quiet_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    run(3, total=8, unit="steps", quiet=True)
    assert capsys.readouterr().err == ""


def test_only_the_page_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    left = remaining_work(out)
    out.mkdir()
    with pytest.raises(typer.Exit) as end, interruptible(left):
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    assert "only figures, page or upload are missing" in capsys.readouterr().err


def test_an_older_folder_is_nothing_that_is_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(KeyboardInterrupt), interruptible(remaining_work(out)):
        raise KeyboardInterrupt


def test_an_interrupted_import_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had half imported would fail, and the user see a traceback."""
    out = tmp_path / "out"
    left = remaining_work(out)
    journal_path(out).mkdir()

    def refused(name: str, *_: Any) -> None:
        raise ModuleNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", refused)
        told = left()
    assert told is not None
    assert "the same command continues" in told


def ended(reaction: str) -> tuple[int, str]:
    """The command whose modules, while they are imported, react to Ctrl-C like this."""
    code = (
        "import os, signal, sys, types, moemerge.cli\n"
        "class Slow(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        f"        except KeyboardInterrupt: {reaction}\n"
        "sys.modules['moemerge.cli.app'] = Slow('moemerge.cli.app')\n"
        "moemerge.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_ctrl_c_before_the_command_has_begun() -> None:
    assert ended("raise") == (130, "error: interrupted; nothing was left behind by this run\n")


def test_a_library_that_makes_another_error_of_it() -> None:
    assert ended("raise RuntimeError('half imported')") == (130, "error: interrupted\n")


def test_errors_that_nobody_foresaw_are_one_sentence_and_a_log(tmp_path: Path) -> None:
    code = "import sys, moemerge.cli\nsys.modules['moemerge.cli.app'] = None\nmoemerge.cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 1
    (log,) = tmp_path.iterdir()
    assert done.stderr == (
        "error: this should not have happened (ModuleNotFoundError); no incomplete output was left "
        f"behind, and {log} has details: please report it\n"
    )
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0  # it may name what is private


def test_what_the_system_lacks_is_named() -> None:
    """In the sentence of the last resort, where nothing nearer has said so."""
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for error, what in ((too_many, "(ulimit -n)"), (MemoryError(), "the memory was not enough")):
        sentence = cli._unforeseen(error)
        assert what in sentence
        log = re.search(r"and (\S+) has details", sentence)
        assert log is not None
        Path(log[1]).unlink()
