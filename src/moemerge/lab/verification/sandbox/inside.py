"""Run in the confined process: drop all rights, then call a function, such as the last one here.

`process` starts it as `python -c`, with its orders as JSON in the first argument, the request on
stdin, and stdout for the answer. It imports as little of the standard library as possible.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Any

from moemerge.lab.verification.sandbox import system

READY = b"ready\n"  # the first line of an answer: the confinement is complete


def main() -> None:
    orders = json.loads(sys.argv[1])
    module, _, name = orders["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    request = sys.stdin.buffer.read()
    limits = orders["limits"]
    if orders["how"] == "namespaces":
        room, seconds = limits["file_bytes"], limits["wall_seconds"]
        system.enter_namespaces(orders["readable"], orders["folder"], room, seconds)
    else:
        os.chdir(orders["folder"])
    answer = _channel()
    _limit(limits, own_users=orders["how"] == "namespaces")
    if sys.platform == "linux":
        _give_up_rights(orders)
    sys.path += orders["packages"]
    sys.argv = [""]
    answer(READY)
    function(request, answer)
    os._exit(0)  # threads that a program left running do not matter


def _channel() -> Callable[[bytes], None]:
    """Keep stdout for the answer, and discard what the program prints."""
    channel = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)

    def answer(data: bytes) -> None:
        while data:
            data = data[os.write(channel, data) :]

    return answer


def _limit(limits: dict[str, Any], *, own_users: bool) -> None:
    bounds = [
        (resource.RLIMIT_CPU, math.ceil(limits["cpu_seconds"])),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ]
    if own_users:  # otherwise it would count all processes of the user
        bounds.append((resource.RLIMIT_NPROC, limits["processes"]))
    for kind, most in bounds:
        _soft, hard = resource.getrlimit(kind)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(kind, (bound, bound))
        except (ValueError, OSError):  # macOS has no limit on memory
            continue


def _give_up_rights(orders: dict[str, Any]) -> None:
    system.gain_no_privileges()
    if orders["how"] == "landlock":
        readable = [*orders["readable"], *system.DEVICES]
        system.confine_files(readable, [orders["folder"], os.devnull])
    system.drop_capabilities()
    system.prctl(system.PR_SET_DUMPABLE, 0)
    if system.has_filters():
        # A kernel without filters is accepted: `try_everything` finds out what is still protected.
        with contextlib.suppress(OSError):
            system.filter_calls(own_files=orders["how"] == "namespaces")


def try_everything(request: bytes, answer: Callable[[bytes], None]) -> None:
    """Find out by trying what this process can do: answer which forbidden actions are refused."""
    import socket  # only here: every other start is faster without it

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
