"""Find out by trying what a confined process can do. Runs inside the sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable


def try_everything(request: bytes, answer: Callable[[bytes], None]) -> None:
    """Answer which forbidden actions are refused."""
    outside = json.loads(request)
    tries: dict[str, Callable[[], object]] = {
        "network": lambda: socket.create_connection(("127.0.0.1", outside["port"]), 1).close(),
        "signals": lambda: os.kill(outside["pid"], 0),
        "processes": _fork,
        "reading": lambda: open(outside["file"]).close(),
    }
    answer(json.dumps({name: _refused(attempt) for name, attempt in tries.items()}).encode())
    # The caller checks whether the file outside was changed.
    with contextlib.suppress(OSError), open(outside["file"], "w"):
        pass
    with contextlib.suppress(OSError):
        os.chmod(outside["file"], 0o400)


def _refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def _fork() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
