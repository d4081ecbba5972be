"""Where text goes: results to stdout, progress, notes and errors to stderr."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
import sys
import threading
import time
import unicodedata
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
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from moemerge.cli import INTERRUPTED
from moemerge.cli.wording import in_flags
from moemerge.errors import CheckpointError
from moemerge.runtime.files import write_whole

# Those that move a terminal's cursor, change its colours or turn its text around.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
UNLIMITED = 1_000_000  # characters of a line where no terminal ends it


class _Plain(Console):
    """Shows control characters, of names that come from files, instead of sending them."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(_CONTROL.sub(_shown, text), **options)


def _shown(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class _Stdout(_Plain):
    """Results: as wide as the terminal, and without limit in a pipe or a file.

    There no line is wrapped or padded, unless COLUMNS says how wide it should be.
    """

    @property  # type: ignore[misc]  # nobody sets it
    def size(self) -> ConsoleDimensions:
        size = super().size
        limited = self.is_terminal or self._environ.get("COLUMNS")
        return size if limited else ConsoleDimensions(UNLIMITED, size.height)

    def print(self, *objects: Any, **options: Any) -> None:
        options = {"crop": False, **options}  # no number is ever cut
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as captured:
            super().print(*objects, **options)
        text = "\n".join(line.rstrip() for line in captured.get().split("\n"))
        try:
            self.file.write(text)
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """`moemerge ls methods | head`: the reader left, and that is no error."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


# Without emoji: `:b:` in a path or a token would come out as a picture, in JSON too.
out = _Stdout(highlight=False, emoji=False)
err = _Plain(stderr=True, highlight=False, emoji=False)

# What stands in for characters that a terminal's encoding lacks.
SUBSTITUTES = {
    "→": "->", "…": "...", "–": "-", "−": "-", "‖": "||", "×": "x", "•": "*", "·": "|", "’": "'",
    "≤": "<=", "≥": ">=", "½": "1/2", "Σ": "sum", "█": "#",
    **dict.fromkeys("▋▊▉", "="), **dict.fromkeys("▏▎▍▌", "-"),
}  # fmt: skip


def substitute(error: UnicodeError) -> tuple[str, int]:
    """A codec's answer to characters that it cannot encode: those above, bare letters, or `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = []
    for character in error.object[error.start : error.end]:
        letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
        text.append(SUBSTITUTES.get(character) or letters or "?")
    return "".join(text), error.end


def use_any_encoding() -> None:
    """Let stdout and stderr write whatever they are given, in ASCII and cp1252 too."""
    codecs.register_error("moemerge", substitute)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="moemerge")


def show_error(message: str) -> None:
    first, _, rest = message.partition("\n")
    err.print(f"[bold red]error:[/] {escape(first)}", soft_wrap=True)
    if rest:
        err.print(escape(rest), soft_wrap=True)


def show_json(value: Any) -> None:
    """One JSON document on stdout, for programs: in an encoding that lacks characters, escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if not out.encoding.startswith("utf") or _CONTROL.search(text):
        text = json.dumps(value, indent=2)
    out.print(text, markup=False, soft_wrap=True)


STDOUT = "-"


def deliver_json(value: Any, target: str) -> None:
    """A report where `--json` wants it: a file, or stdout for `-`."""
    if target == STDOUT:
        show_json(value)
        return
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    try:
        path = Path(target)
        if path.exists() and not path.is_file():  # a pipe, or /dev/stderr
            path.write_text(text, encoding="utf-8")
        else:
            write_whole(path, text.encode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"--json {target}: cannot be written: {error.strerror}") from error


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
    """What a bar would show, as a line every LOG_EVERY seconds; short jobs leave none."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._total = self._done = 0
        self._status = ""
        self._begun = self._last = time.monotonic()

    def add_task(self, what: str, total: int, status: str) -> str:
        self._total, self._status = total, status
        return what

    def update(self, task: str, *, status: str) -> None:
        self._status = status

    def start(self) -> None:
        self._begun = self._last = time.monotonic()

    def advance(self, task: str, amount: int) -> None:
        self._done = min(self._done + amount, self._total)
        now = time.monotonic()
        if self._done == 0 or now - self._last < LOG_EVERY:
            return
        self._last = now
        left = timedelta(seconds=round((now - self._begun) * (self._total / self._done - 1)))
        if self._unit == "B":
            so_far = f"{filesize.decimal(self._done)} of {filesize.decimal(self._total)}"
        else:
            so_far = f"{self._done} of {self._total} {self._unit}"
        words = [so_far, self._status, f"{left} left"] if self._status else [so_far, f"{left} left"]
        err.print(f"{task}: {', '.join(words)}", markup=False, soft_wrap=True)

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
    status = TextColumn("{task.fields[status]}", markup=False)
    return [TextColumn("{task.description}"), BarColumn(), *amount, status, TimeRemainingColumn()]


@contextmanager
def progress(*, quiet: bool) -> Iterator[Bar]:
    """A bar that is always taken off the screen again."""
    bar = Bar(quiet=quiet)
    try:
        yield bar
    finally:
        bar.finish()


GOES_ON = "the same command goes on with the answers that are there"


def waiting(path: Path, words: str) -> Callable[[], str | None]:
    """For `interruptible`: the words, where `path` then waits to be resumed."""
    return lambda: words if path.exists() else None


@contextmanager
def interruptible(what_is_left: Callable[[], str | None]) -> Iterator[None]:
    """On Ctrl-C say what is left, and end; None leaves the word to the caller.

    `what_is_left` must not import anything: if an import was interrupted, half-made modules are
    about, and importing them again fails.
    """
    try:
        yield
    except KeyboardInterrupt:
        left = what_is_left()
        if left is None:
            raise
        err.print(f"[bold red]interrupted;[/] {escape(left)}", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
