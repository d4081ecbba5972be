"""Progress of a job: packages report it, and only the command line shows it."""

from __future__ import annotations

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


def counted(number: int, one: str, several: str = "") -> str:
    """Return `1 row`, `2 rows`, `12,000 rows`; `several` is an irregular plural."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
