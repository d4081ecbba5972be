"""What a long job tells about itself. Rooms below the command line report; only the cli draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Progress(Protocol):
    """A job announces its size once, then its steps. Calls may come from any thread."""

    def start(self, what: str, total: int, *, unit: str) -> None: ...

    def advance(self, amount: int) -> None: ...

    def status(self, message: str) -> None:
        """A few words that stand with the progress, until others take their place."""
        ...

    def note(self, message: str) -> None:
        """A line worth showing now (a warning, a finished layer)."""
        ...

    def finish(self) -> None: ...


class Silent:
    """Progress for nobody."""

    def start(self, what: str, total: int, *, unit: str) -> None: ...

    def advance(self, amount: int) -> None: ...

    def status(self, message: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...


def counted(number: int, one: str, several: str = "") -> str:
    """`1 row`, `2 rows`, `12,000 rows`; `several` where more than an s is to be added."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
