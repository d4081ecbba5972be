"""Processes that judge for us, each asked one thing at a time and ended when it takes too long.

Libraries that judge may hang, eat memory or print; a time limit by signals works in main threads
only. So they live in processes of their own, which talk in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

MEMORY: Final = 4 * 2**30  # address space of a worker
START_SECONDS: Final = 120.0  # for its imports, on a busy machine
READY: Final = {"ready": True}


class WorkerPool:
    """At most `size` processes of one module, started when they are needed."""

    def __init__(self, module: str, *, size: int, seconds: float) -> None:
        self._seconds = seconds
        self._all = [_Worker(module, seconds) for _ in range(size)]
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._free.put(worker)

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The answer, or None where it took too long or brought the process down."""
        worker = self._free.get()
        try:
            return worker.ask(question)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.stop()


class _Worker:
    def __init__(self, module: str, seconds: float) -> None:
        self._command = [sys.executable, "-P", "-m", module, str(seconds)]
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            answer = None
        else:
            answer = self._line(process, self._seconds)
        if answer is None:
            self.stop()
        return answer

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._rest = b""
            if self._line(self._process, START_SECONDS) != READY:
                code = self._process.poll()
                self.stop()
                raise WorkerError(self._command[3], code)
        return self._process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any] | None:
        assert process.stdout is not None
        pipe, deadline = process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                return None
            piece = os.read(pipe, 1 << 16)
            if not piece:
                return None
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class WorkerError(RuntimeError):
    """A worker did not start: a fault of the installation, not of an answer."""

    def __init__(self, module: str, exit_code: int | None) -> None:
        super().__init__(f"{module} did not start (exit code {exit_code}); its words are above")


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side: answer each line of stdin with a line on stdout. Nobody else prints there."""
    seconds = float(sys.argv[1])
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with contextlib.suppress(ValueError, OSError):  # macOS knows no limit on memory
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    channel.write(json.dumps(READY).encode() + b"\n")
    for line in sys.stdin.buffer:
        # Should the process that asks be gone, nobody else would end this one.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        channel.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        signal.setitimer(signal.ITIMER_REAL, 0)
