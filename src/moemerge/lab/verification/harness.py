"""Run one program with its tests, inside the sandbox.

A pass counts only if a secret comes back with it. So a program that exits early, prints "ok" or
returns 0 has not passed. A program that sets out to forge a pass can, since it shares the process
with its tests: the sandbox protects the machine, not the score.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any

LONGEST_DETAIL = 300
MODULE = "solution"  # not "__main__": code under that guard is not part of the solution


def judge(request: bytes, answer: Callable[[bytes], None]) -> None:
    """Answer {"secret", "passed", "detail", "seconds"}; `seconds` is processor time."""
    job = json.loads(request)
    secret = job.pop("secret")
    began = time.process_time()
    passed, detail = _run(job)
    seconds = time.process_time() - began
    report = {"secret": secret, "passed": passed, "detail": detail, "seconds": seconds}
    answer(json.dumps(report).encode())


def _run(job: dict[str, Any]) -> tuple[bool, str]:
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module  # dataclasses and pickle look up their module
    stage = "program"
    try:
        exec(compile(job["program"], "<program>", "exec"), module.__dict__)
        stage = "tests"
        exec(compile(job["tests"], "<tests>", "exec"), module.__dict__)
        return True, ""
    except BaseException as error:  # a program may raise anything, SystemExit included
        return False, f"{stage}: {_describe(error)}"


def _describe(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        text = str(error)
    except BaseException:  # its __str__ is code of the program
        text = ""
    first = text.strip().splitlines()[0] if text.strip() else ""
    return f"{kind}: {first}"[:LONGEST_DETAIL] if first else kind
