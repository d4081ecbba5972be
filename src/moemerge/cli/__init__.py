"""The command line: verbs, flags, exit codes. The only room that prints or sets up logging."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # the exit code after Ctrl-C
NOTHING_LEFT = "interrupted; nothing was left behind"

_pressed = False


def main() -> None:
    """Entry point of the `moemerge` command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _note)
    code: object = 0
    try:
        from moemerge.cli.app import app
        from moemerge.cli.console import use_any_encoding
        from moemerge.runtime.process import keep_few_kernels, own_process

        use_any_encoding()
        own_process()
        keep_few_kernels()
        app(prog_name="moemerge")
    except SystemExit as end:
        code = end.code
    except KeyboardInterrupt:  # before the command has begun; `app` answers later ones
        sys.stderr.write(f"error: {NOTHING_LEFT}\n")
        code = INTERRUPTED
    except Exception:
        if not _pressed:
            raise
        sys.stderr.write("error: interrupted\n")
        code = INTERRUPTED
    sys.stdout.flush()
    sys.stderr.flush()
    # By now every file is closed and in its place. Taking torch apart would only cost the user
    # another third of a second.
    os._exit(code if isinstance(code, int) else 0)


def _note(number: int, frame: FrameType | None) -> None:
    """Ctrl-C as ever, but known of: libraries that it breaks off may raise errors of their own."""
    global _pressed
    _pressed = True
    signal.default_int_handler(number, frame)
