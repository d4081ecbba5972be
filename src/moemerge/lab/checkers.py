"""Worker processes that run the checkers of other libraries, with a time limit per question.

Such a library may hang, use much memory or print, and a time limit by signals works in the main
thread only. So it runs in its own process (`python -m moemerge.lab.checkers CHECKER`),
which reads questions and writes answers as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final, Literal

MEMORY: Final = 4 * 2**30  # address space of a worker
START_SECONDS: Final = 120.0  # for its imports, on a busy machine
Checker = Literal["math", "instructions"]
Question = dict[str, Any]
READY: Final = {"ready": True}


class WorkerPool:
    """At most `size` processes of one checker, started when they are needed."""

    def __init__(self, checker: Checker, *, size: int, seconds: float) -> None:
        self._all = [_Worker(checker, seconds) for _ in range(size)]
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._free.put(worker)

    def ask(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer, or None if it took too long or the process died."""
        worker = self._free.get()
        try:
            return worker.ask(question)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.stop()


class _Worker:
    def __init__(self, checker: Checker, seconds: float) -> None:
        self._checker = checker
        self._command = [sys.executable, "-P", "-m", __name__, checker, str(seconds)]
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
                raise WorkerError(self._checker, code)
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
    """A worker did not start: the installation is at fault, not an answer."""

    def __init__(self, checker: Checker, exit_code: int | None) -> None:
        super().__init__(
            f"the checker of {checker} did not start (exit code {exit_code}); "
            "its messages are above"
        )


# --- inside a worker ------------------------------------------------------------------------------


def serve(answer: Callable[[Question], dict[str, Any]], seconds: float) -> None:
    """Answer each line of stdin with a line on stdout. Whatever else is printed goes to stderr."""
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with contextlib.suppress(ValueError, OSError):  # macOS has no limit on memory
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    channel.write(json.dumps(READY).encode() + b"\n")
    for line in sys.stdin.buffer:
        # The parent kills a slow worker. This alarm ends one whose parent has died.
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds)
        channel.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        signal.setitimer(signal.ITIMER_REAL, 0)


def math_checker() -> Callable[[Question], dict[str, Any]]:
    """Return a function that compares formulas with math-verify."""
    from math_verify import parse, verify

    logging.disable()  # it warns at every call that its own time limits are off

    def check(question: Question) -> dict[str, Any]:
        # A bare gold answer would be parsed only in part: 3\sqrt{13} as 3.
        gold = parse(f"${question['gold']}$", parsing_timeout=None)
        if question.get("bare"):  # as published
            gold = parse(question["gold"], parsing_timeout=None)
        elif not gold:
            return {"grade": "undecided"}
        parsed = False
        for text in question["texts"]:
            answer = parse(text, parsing_timeout=None)
            parsed = parsed or bool(answer)
            if answer and verify(gold, answer, timeout_seconds=None):
                return {"grade": "right"}
        return {"grade": "wrong" if parsed else "no answer"}

    return check


PUNKT: Final = (
    "needs NLTK's sentence splitter, which is not installed: python -m nltk.downloader punkt_tab"
)


def instructions_checker() -> Callable[[Question], dict[str, Any]]:
    """Return a function that checks instructions with lm-eval's IFEval checkers."""
    # On rank 0, lm-eval downloads NLTK's data on import, and reports success even if that failed.
    os.environ["LOCAL_RANK"] = "1"
    from langdetect import DetectorFactory
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    DetectorFactory.seed = 0  # otherwise the detected language is random

    def check(question: Question) -> dict[str, Any]:
        followed, error = [], ""
        for name, given in zip(question["names"], question["given"], strict=True):
            try:
                followed.append(is_followed(name, given, question))
            except LookupError as missing:
                followed.append(False)
                known = name in INSTRUCTION_DICT
                error = f"{name} {PUNKT}" if known else f"unknown instruction {missing}"
            except Exception as other:  # a checker may fail on unusual texts
                followed.append(False)
                error = f"{name}: {type(other).__name__}: {other}"
        return {"followed": followed, "error": error}

    def is_followed(name: str, given: dict[str, Any], question: Question) -> bool:
        checker = INSTRUCTION_DICT[name](name)
        checker.build_description(**{key: value for key, value in given.items() if value})
        if "prompt" in (checker.get_instruction_args() or {}):
            checker.build_description(prompt=question["prompt"])
        return bool(checker.check_following(question["response"]))

    return check


if __name__ == "__main__":
    checkers = {"math": math_checker, "instructions": instructions_checker}
    serve(checkers[sys.argv[1]](), float(sys.argv[2]))
