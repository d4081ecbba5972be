"""Output streams: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from rich import filesize
from rich.console import Console, ConsoleDimensions
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from moemerge.cli import INTERRUPTED
from moemerge.errors import CheckpointError
from moemerge.runtime.files import write_whole
from moemerge.runtime.journals import journal_path, saved_path
from moemerge.version import __version__

# Characters that move the cursor, change colours or reverse the text direction.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
UNLIMITED = 1_000_000  # characters per line if stdout is not a terminal
STDOUT = "-"


class _Plain(Console):
    """Escape control characters, which names from files may contain."""

    def render_str(self, text: str, **options: Any) -> Text:
        safe = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
        return super().render_str(safe, **options)


class _Stdout(_Plain):
    """Print results at the terminal's width, and unwrapped into a pipe or a file.

    COLUMNS sets the width in both cases.
    """

    @property  # type: ignore[misc]  # read-only here
    def size(self) -> ConsoleDimensions:
        size = super().size
        limited = self.is_terminal or self._environ.get("COLUMNS")
        return size if limited else ConsoleDimensions(UNLIMITED, size.height)

    def print(self, *objects: Any, **options: Any) -> None:
        options = {"crop": False, **options}  # numbers are never truncated
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        try:
            self.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
            self.file.flush()
        except BrokenPipeError:  # the reader has seen enough, as in `moemerge ls methods | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None


# Without emoji: `:b:` in a path or a token would be replaced, even in JSON.
out = _Stdout(highlight=False, emoji=False)
err = _Plain(stderr=True, highlight=False, emoji=False)


def use_any_encoding() -> None:
    """Replace characters that the terminal's encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


_SETTING = re.compile(r"`([a-z][a-z_]*)=([^`]+)`")
_SINGULAR = {"sources": "source", "weights": "weight", "tasks": "task"}


def in_flags(text: str) -> str:
    """Write settings in messages as flags: `offload="disk"` becomes --offload disk."""

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        words = f"--{_SINGULAR.get(name, name).replace('_', '-')}"
        if value in ("True", "False"):
            return words if value == "True" else words.replace("--", "--no-", 1)
        if value.startswith("{"):
            pairs = re.findall(r"(\w+)\"?: \"?([^,}\"]+)", value)
            return " ".join(f"{words} {key}={one}" for key, one in pairs)
        return f"{words} {value.strip(chr(34))}"

    return _SETTING.sub(flag, text)


def show_error(message: str) -> None:
    first, _, rest = message.partition("\n")
    err.print(f"[bold red]error:[/] {escape(first)}", soft_wrap=True)
    if rest:
        err.print(escape(rest), soft_wrap=True)


def show_json(value: Any) -> None:
    """Print one JSON document on stdout, escaped if the encoding requires it."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if not out.encoding.startswith("utf") or _CONTROL.search(text):
        text = json.dumps(value, indent=2)
    out.print(text, markup=False, soft_wrap=True)


def deliver_json(value: Any, target: str) -> None:
    """Write a report to the target of `--json`: a file, or stdout for `-`."""
    if target == STDOUT:
        show_json(value)
        return
    # The first key marks the file as ours: `--overwrite` replaces no other.
    text = json.dumps({"moemerge": __version__, **value}, indent=2, ensure_ascii=False) + "\n"
    try:
        if is_stream(Path(target)):
            Path(target).write_text(text, encoding="utf-8")
        else:
            write_whole(Path(target), text.encode("utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"--json {target}: cannot be written: {error.strerror}",
            hint="everything else is done; only this report is missing",
        ) from error


def is_stream(path: Path) -> bool:
    """Return whether this is a pipe or a device, also if it is redirected to a file."""
    device = path.absolute().parent in (Path("/dev"), Path("/dev/fd"))
    return device or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


# --- progress -------------------------------------------------------------------------------------

# Seconds between two lines of progress if stderr is not a terminal.
LOG_EVERY = 30.0


class Bar:
    """Show progress on stderr with rate and time left: a bar, or lines in a log."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._lock = threading.Lock()
        self._bar: RichProgress | _Log | None = None
        self._task: Any = None

    def start(self, what: str, total: int, *, unit: str) -> None:
        if self._quiet:
            return
        if err.is_terminal:
            amount: list[ProgressColumn] = [MofNCompleteColumn(), TextColumn(unit)]
            if unit == "B":
                amount = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
            status = TextColumn("{task.fields[status]}", markup=False)
            columns = [BarColumn(), *amount, status, TimeRemainingColumn()]
            what_column = TextColumn("{task.description}")
            self._bar = RichProgress(what_column, *columns, console=err, transient=True)
        else:
            self._bar = _Log(unit)
        self._task = self._bar.add_task(what, total=total, status="")
        self._bar.start()

    def advance(self, amount: int) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.advance(self._task, amount)

    def status(self, message: str) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.update(self._task, status=message)

    def note(self, message: str) -> None:
        if not self._quiet:
            err.print(escape(in_flags(message)), soft_wrap=True)

    def finish(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


class _Log:
    """Print progress as a line every LOG_EVERY seconds; short jobs print none."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._total = self._done = 0
        self._status = ""
        self._last = time.monotonic()
        # The first step includes loading and warm-up, so the time left is estimated without it.
        self._first: tuple[float, int] | None = None

    def add_task(self, what: str, total: int, status: str) -> str:
        self._total, self._status = total, status
        return what

    def update(self, task: str, *, status: str) -> None:
        self._status = status

    def start(self) -> None:
        self._last = time.monotonic()

    def advance(self, task: str, amount: int) -> None:
        self._done = min(self._done + amount, self._total)
        now = time.monotonic()
        if self._done and self._first is None:
            self._first = (now, self._done)
        if self._first is None or now - self._last < LOG_EVERY:
            return
        self._last = now
        if self._unit == "B":
            so_far = f"{filesize.decimal(self._done)} of {filesize.decimal(self._total)}"
        else:
            so_far = f"{self._done} of {self._total} {self._unit}"
        begun, before = self._first
        left = ""
        if self._done > before:
            rate = (now - begun) / (self._done - before)
            left = f"{timedelta(seconds=round(rate * (self._total - self._done)))} left"
        words = ", ".join(filter(None, (so_far, self._status, left)))
        err.print(f"{task}: {words}", markup=False, soft_wrap=True)

    def stop(self) -> None:
        pass


@contextmanager
def progress(*, quiet: bool) -> Iterator[Bar]:
    """Yield a progress bar and remove it at the end."""
    bar = Bar(quiet=quiet)
    try:
        yield bar
    finally:
        bar.finish()


# --- interrupts -----------------------------------------------------------------------------------

CONTINUES = "the same command continues with the finished work"


def waiting(path: Path) -> Callable[[], str | None]:
    """Return a callback for `interruptible`: the message if `path` exists and can be resumed."""
    return lambda: CONTINUES if os.path.exists(path) else None


def remaining_work(out_folder: Path) -> Callable[[], str | None]:
    """Return a function that describes, after an interrupt, how to continue."""
    unfinished = (journal_path(out_folder), saved_path(out_folder))

    def inode() -> int | None:  # differs for a folder that has replaced another
        try:
            return out_folder.stat().st_ino
        except OSError:
            return None

    before = inode()

    def remaining() -> str | None:
        if any(os.path.exists(folder) for folder in unfinished):
            return CONTINUES
        if inode() not in (None, before):
            return f"{out_folder} is complete; only figures, page or upload are missing"
        return None

    return remaining


@contextmanager
def interruptible(what_is_left: Callable[[], str | None]) -> Iterator[None]:
    """On Ctrl-C, print what remains on disk and exit; re-raise if `what_is_left` returns None.

    `what_is_left` must not import anything: an interrupted import leaves partial modules behind.
    """
    try:
        yield
    except KeyboardInterrupt:
        left = what_is_left()
        if left is None:
            raise
        err.print(f"[bold red]interrupted;[/] {escape(left)}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
