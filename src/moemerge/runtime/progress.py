"""Progress of a job: packages report it, and only the command line shows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol


class Progress(Protocol):
    """A job announces its size once, then its steps. Calls may come from any thread."""

    def start(self, what: str, total: int, *, unit: str) -> None: ...

    def advance(self, amount: int) -> None: ...

    def status(self, message: str) -> None:
        """Set a short message that is shown with the progress until the next one."""
        ...

    def note(self, message: str) -> None:
        """Show a line now (a warning, a finished layer)."""
        ...

    def finish(self) -> None: ...


class Silent:
    """Progress that is not shown."""

    def start(self, what: str, total: int, *, unit: str) -> None: ...

    def advance(self, amount: int) -> None: ...

    def status(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...


class TimeLeft:
    """Estimates the time that similar steps of a job still take.

    The first step is excluded: it includes what happens once.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._timed = -1
        self._began = 0.0

    def skip(self) -> None:
        """Count a step that an earlier run had finished."""
        self._left -= 1

    def step(self) -> str:
        """Count a finished step; return `, 12 s left`, or nothing if no estimate is possible."""
        now = time.perf_counter()
        self._left -= 1
        self._timed += 1
        if self._timed == 0:
            self._began = now
        if self._timed == 0 or self._left == 0:
            return ""
        return f", {(now - self._began) / self._timed * self._left:.0f} s left"


def counted(number: int, one: str, several: str = "") -> str:
    """Return `1 row`, `2 rows`, `12,000 rows`; `several` is an irregular plural."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
