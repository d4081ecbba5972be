"""The command line: verbs, flags, exit codes. The only room that prints or sets up logging."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `moemerge` command."""
    from moemerge.cli.app import app
    from moemerge.runtime.allocator import keep_few_kernels, own_process

    own_process()
    keep_few_kernels()
    code: object = 0
    try:
        app(prog_name="moemerge")
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    # By now every file is closed and in its place. Taking torch apart would only cost the user
    # another third of a second.
    os._exit(code if isinstance(code, int) else 0)
