"""Runs one program with its tests. Inside the sandbox only.

A pass counts only when a secret comes back with it, so a program that leaves early, prints "ok" or
exits with 0 has not passed. One that is bent on forging its pass shares the process with its tests,
and can: the sandbox protects the machine, not the score.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any

LONGEST_DETAIL = 300
MODULE = "solution"  # not "__main__": what stands under that guard is no part of the solution


def judge(request: bytes, answer: Callable[[bytes], None]) -> None:
    """Answers {"secret", "passed", "detail", "seconds"}; `seconds` is processor time."""
    job = json.loads(request)
    secret = job.pop("secret")
    began = time.process_time()
    passed, detail = _run(job)
    seconds = time.process_time() - began
    report = {"secret": secret, "passed": passed, "detail": detail, "seconds": seconds}
    answer(json.dumps(report).encode())


def _run(job: dict[str, Any]) -> tuple[bool, str]:
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module  # dataclasses and pickle look their module up
    stage = "program"
    try:
        exec(compile(job["program"], "<program>", "exec"), module.__dict__)
        stage = "tests"
        exec(compile(job["tests"], "<tests>", "exec"), module.__dict__)
        return True, ""
    except BaseException as error:  # a program may raise anything, SystemExit included
        return False, f"{stage}: {_in_words(error)}"


def _in_words(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # its __str__ is the program's own
        text = ""
    first = text.strip().splitlines()[0] if text.strip() else ""
    return f"{kind}: {first}"[:LONGEST_DETAIL] if first else kind
