"""Where text goes: results to stdout, progress, notes and errors to stderr."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from moemerge.errors import CheckpointError


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        """`moemerge ls methods | head`: the reader left, and that is no error."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


# Without emoji: `:b:` in a path or a token would come out as a picture, in JSON too.
out = _Stdout(highlight=False, emoji=False)
err = Console(stderr=True, highlight=False, emoji=False)


def show_error(message: str) -> None:
    first, _, rest = message.partition("\n")
    err.print(f"[bold red]error:[/] {escape(first)}", soft_wrap=True)
    if rest:
        err.print(escape(rest), soft_wrap=True)


def show_json(value: Any) -> None:
    """One JSON document on stdout, for programs."""
    out.print(json.dumps(value, indent=2, ensure_ascii=False), markup=False, soft_wrap=True)


STDOUT = "-"


def deliver_json(value: Any, target: str) -> None:
    """A report where `--json` wants it: a file, or stdout for `-`."""
    if target == STDOUT:
        show_json(value)
        return
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"--json {target}: cannot be written: {error.strerror}") from error


def tell_page(path: Path | None, *, quiet: bool) -> None:
    """Where the HTML page lies, if one was asked for."""
    if path is not None and not quiet:
        err.print(f"page: {path}", markup=False, soft_wrap=True)


# Seconds between two lines of progress where no bar can be drawn: a log stays short.
LOG_EVERY = 30.0


class Bar:
    """Progress on stderr with rate and time left: a bar, or lines where stderr is no terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._lock = threading.Lock()
        self._bar: RichProgress | _Log | None = None
        self._task: Any = None

    def start(self, what: str, total: int, *, unit: str) -> None:
        if self._quiet:
            return
        if err.is_terminal:
            self._bar = RichProgress(*_columns(unit), console=err, transient=True)
        else:
            self._bar = _Log(unit)
        self._task = self._bar.add_task(what, total=total)
        self._bar.start()

    def advance(self, amount: int) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.advance(self._task, amount)

    def note(self, message: str) -> None:
        if not self._quiet:
            err.print(escape(message), soft_wrap=True)

    def finish(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


class _Log:
    """What a bar would show, as a line every LOG_EVERY seconds; short jobs leave none."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._total = self._done = 0
        self._begun = self._told = time.monotonic()

    def add_task(self, what: str, total: int) -> str:
        self._total = total
        return what

    def start(self) -> None:
        self._begun = self._told = time.monotonic()

    def advance(self, task: str, amount: int) -> None:
        self._done = min(self._done + amount, self._total)
        now = time.monotonic()
        if self._done == 0 or now - self._told < LOG_EVERY:
            return
        self._told = now
        left = timedelta(seconds=round((now - self._begun) * (self._total / self._done - 1)))
        if self._unit == "B":
            so_far = f"{filesize.decimal(self._done)} of {filesize.decimal(self._total)}"
        else:
            so_far = f"{self._done} of {self._total} {self._unit}"
        err.print(f"{task}: {so_far}, {left} left", markup=False, soft_wrap=True)

    def stop(self) -> None:
        pass


class _Rate(ProgressColumn):
    """Units a second, once there is anything to tell."""

    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.3g}/s")


def _columns(unit: str) -> list[ProgressColumn]:
    amount: list[ProgressColumn] = (
        [DownloadColumn(binary_units=True), TransferSpeedColumn()]
        if unit == "B"
        else [MofNCompleteColumn(), TextColumn(unit), _Rate()]
    )
    return [TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn()]


@contextmanager
def progress(*, quiet: bool) -> Iterator[Bar]:
    """A bar that is always taken off the screen again."""
    bar = Bar(quiet=quiet)
    try:
        yield bar
    finally:
        bar.finish()
