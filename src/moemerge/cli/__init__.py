"""The command line: commands, flags, exit codes. The only package that prints."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any

UNFORESEEN = 1  # the exit code after an unexpected error
UNUSABLE = 3  # the exit code if a file or folder cannot be used
INTERRUPTED = 130  # the exit code after Ctrl-C
TERMINATED = 143  # the exit code after SIGTERM
NOTHING_LEFT = "interrupted; nothing was left behind by this run"


def main() -> None:
    """Entry point of the `moemerge` command."""
    caught: list[int] = []
    process = os.getpid()

    def interrupt(number: int, frame: Any) -> None:
        """Handle SIGTERM like Ctrl-C, so that temporary files are removed."""
        if os.getpid() != process:  # a fork has nothing to clean up
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        caught.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the parent may ignore it
        signal.signal(signal.SIGINT, interrupt)
    # torchrun stops its processes by SIGTERM, also those that wait for others and cannot clean up.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "WORLD_SIZE" not in os.environ:
        signal.signal(signal.SIGTERM, interrupt)
    code: object = 0
    problem = ""
    try:
        from moemerge.cli.app import app
        from moemerge.cli.console import use_any_encoding
        from moemerge.runtime.process import configure_process

        use_any_encoding()
        configure_process()
        app(prog_name="moemerge")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before the command starts; `app` handles later ones
        problem, code = NOTHING_LEFT, INTERRUPTED
    except BaseException as error:
        # Interrupted libraries may raise other errors.
        problem, code = ("interrupted", INTERRUPTED) if caught else _unforeseen(error)
    if code == INTERRUPTED and signal.SIGTERM in caught:
        code = TERMINATED
    with suppress(OSError):  # a stream is full, or its reader has seen enough
        sys.stderr.write(f"error: {problem}\n" if problem else "")
        sys.stderr.flush()
        sys.stdout.flush()
    # Every file is closed by now. Unloading torch would take another half second.
    os._exit(code if isinstance(code, int) else 0)


def _unforeseen(error: BaseException) -> tuple[str, int]:
    """Return a message about an unexpected error, and the exit code.

    Unless the machine explains the error, the traceback is written to a log file.
    """
    import errno
    import tempfile
    import traceback

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        reason = os.strerror(error.errno)
        return f"stdout or a temporary file cannot be written: {reason}", UNUSABLE
    with tempfile.NamedTemporaryFile(
        "w", prefix="moemerge-error-", suffix=".log", delete=False, encoding="utf-8"
    ) as log:
        log.write(f"moemerge {sys.argv[1:]}\n\n{''.join(traceback.format_exception(error))}")
    what = f"this should not have happened ({type(error).__name__})"
    if isinstance(error, MemoryError):
        what = "the memory was not enough"
    return (
        f"{what}; no incomplete output was left behind, and {log.name} has details: please report "
        "it",
        UNFORESEEN,
    )
