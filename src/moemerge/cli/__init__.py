"""The command line: commands, flags, exit codes. The only package that prints."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # importing `typing` takes time, and nothing slow may run before `main`

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130  # the exit code after Ctrl-C
UNFORESEEN = 1  # the exit code after an unexpected error
UNUSABLE = 3  # the exit code if a file or folder cannot be used
NOTHING_LEFT = "interrupted; nothing was left behind by this run"
TERMINATED = 143  # the exit code after SIGTERM

# The requested command, set by `main`: only its module is imported. An unknown name imports all
# commands.
asked = ""

_pressed = 0  # the signal that interrupted the command
_process = 0  # the id of the process that runs the command


def main() -> None:
    """Entry point of the `moemerge` command."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # unless the parent ignores it
        signal.signal(signal.SIGINT, _note)
    # torchrun stops its processes by SIGTERM, also those that wait for others and cannot clean up.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and "WORLD_SIZE" not in os.environ:
        signal.signal(signal.SIGTERM, _note)
    global asked, _process
    _process = os.getpid()
    _replace_closed_streams()
    asked = next(iter(sys.argv[1:]), "")
    code: object = 0
    problem = ""
    try:
        from moemerge.cli.app import app
        from moemerge.cli.console import use_any_encoding
        from moemerge.runtime.process import configure_process

        _require_current_folder()
        use_any_encoding()
        configure_process()
        app(prog_name="moemerge")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before the command starts; `app` handles later ones
        problem, code = NOTHING_LEFT, INTERRUPTED
    except BaseException as error:
        problem, code = ("interrupted", INTERRUPTED) if _pressed else _unforeseen(error)
    for number in (signal.SIGINT, signal.SIGTERM):  # the command is over
        signal.signal(number, signal.SIG_IGN)
    if code == INTERRUPTED and _pressed == signal.SIGTERM:
        code = TERMINATED
    from contextlib import suppress

    with suppress(OSError):  # stderr is full
        sys.stderr.write(f"error: {problem}\n" if problem else "")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # reported when it was written to
            stream.flush()
    # Every file is closed by now. Unloading torch would take another half second.
    os._exit(code if isinstance(code, int) else 0)


def _replace_closed_streams() -> None:
    """Let streams that the caller closed (`>&-`) discard what is written."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            # In this order each gets its own file descriptor, the lowest one that is free.
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _require_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write("error: the current folder was removed; change to another one\n")
        raise SystemExit(UNUSABLE) from None


def _unforeseen(error: BaseException) -> tuple[str, int]:
    """Return a message about an unexpected error, and the exit code.

    Unless the machine explains the error, the traceback is written to a log file.
    """
    import errno
    import tempfile
    import traceback

    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return f"stdout or a temporary file cannot be written: {os.strerror(number)}", UNUSABLE
    if isinstance(error, MemoryError):
        what = "the memory was not enough"
    elif number in (errno.EMFILE, errno.ENFILE):
        what = "more files had to be open than the system allows (ulimit -n)"
    else:
        what = f"this should not have happened ({type(error).__name__})"
    left = "no incomplete output was left behind"
    try:
        file, name = tempfile.mkstemp(prefix="moemerge-error-", suffix=".log")
        with open(file, "w", encoding="utf-8", errors="backslashreplace") as log:
            log.write(f"moemerge {sys.argv[1:]}\n\n")
            log.write("".join(traceback.format_exception(error)))
    except OSError:
        return f"{what}, and no log of it could be written; {left}", UNFORESEEN
    return f"{what}; {left}, and {name} has details: please report it", UNFORESEEN


def _note(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C as usual, and SIGTERM like it, so that temporary files are removed.

    The signal is recorded: interrupted libraries may raise other errors.
    """
    global _pressed
    if number == signal.SIGTERM and os.getpid() != _process:  # a fork has nothing to clean up
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _pressed = number
    signal.default_int_handler(number, frame)
