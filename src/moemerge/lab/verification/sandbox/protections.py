"""Select the strongest sandbox that works on this system, and find out what it protects."""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moemerge.errors import UsageError
from moemerge.lab.verification.sandbox.process import Sandbox, SandboxError
from moemerge.lab.verification.sandbox.system import landlock_version

# Strongest first. `landlock` and `limits` are for systems that forbid namespaces.
WAYS: Final = ("namespaces", "landlock", "limits")
_WORDS: Final = {
    "network": "the network is cut",
    "processes": "no other process can be started",
    "signals": "other processes cannot be reached",
    "reading": "other files cannot be read",
    "writing": "other files cannot be written",
}


@dataclass(frozen=True)
class Protections:
    """What a program cannot do here, found by trying each action."""

    how: str
    network: bool
    processes: bool
    signals: bool
    reading: bool
    writing: bool

    def sentences(self) -> list[str]:
        """Return the lines that a user who allows programs should read."""
        holds = [words for name, words in _WORDS.items() if getattr(self, name)]
        fails = [words for words in _WORDS.values() if words not in holds]
        lines = [f"programs run in a sandbox ({self.how}): {', '.join(holds) or 'limits'}"]
        return [*lines, f"NOT true on this system: {', '.join(fails)}"] if fails else lines


@functools.cache
def strongest() -> tuple[Sandbox, Protections]:
    """Return the strongest sandbox that works on this system, and its protections."""
    if os.name != "posix":
        raise UsageError(
            "programs cannot be run on this system: it has no process groups and resource limits",
            hint="run code verification on Linux (a container will do), or verify without programs",
        )
    for how in WAYS:
        if not present(how):
            continue
        sandbox = Sandbox(how)
        try:
            return sandbox, protections(sandbox)
        except (SandboxError, ValueError):  # not permitted here, or only in part
            continue
    raise UsageError(
        "programs cannot be run on this system: a confined process does not even start",
        hint=f"check that {sys.executable} runs, and that processes may be limited",
    )


def present(how: str) -> bool:
    if how == "landlock":
        return sys.platform == "linux" and landlock_version() > 0
    return how == "limits" or sys.platform == "linux"


def protections(sandbox: Sandbox) -> Protections:
    """Try the actions that a program must not be able to do."""
    with tempfile.NamedTemporaryFile("w") as file, socket.socket() as listener:
        file.write("kept")
        file.flush()
        mode = os.stat(file.name).st_mode
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        outside = {"port": listener.getsockname()[1], "pid": os.getpid(), "file": file.name}
        function = f"{__package__}.inside:try_everything"
        outcome = sandbox.run(function, json.dumps(outside).encode())
        after = os.stat(file.name).st_mode, Path(file.name).read_text()
        untouched = after == (mode, "kept")
    return Protections(sandbox.how, writing=untouched, **json.loads(outcome.answer))
