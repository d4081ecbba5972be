"""What Ctrl-C leaves behind, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.markup import escape

from moemerge.cli import INTERRUPTED
from moemerge.cli.console import err


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
