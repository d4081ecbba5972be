"""Programs that a model wrote, run in processes of their own under limits.

A program is one expression of `s`. The process that runs it (`sandbox_child.py`) has no site
packages, little memory and little time, opens no files, and refuses all syntax but slices,
operators and a few string methods before it runs anything. It answers program by program, so when
one brings it down, the next process goes on from there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
SECONDS = 10.0  # for all programs of one process; a healthy thousand takes a tenth of a second


def run_programs(programs: Sequence[str], inputs: Sequence[str]) -> list[list[str] | None]:
    """What each program gives for each input; None where it fails or gives no strings."""
    results: list[list[str] | None] = []
    while len(results) < len(programs):
        found = _run_some(programs[len(results) :], inputs)
        results.extend(found)
        # A process that ends may have been worn out by programs before the one it ended with, so
        # that one gets a process of its own; if it ends that as well, it is to blame.
        if not found:
            results.append(None)
    return results


def _run_some(programs: Sequence[str], inputs: Sequence[str]) -> list[list[str] | None]:
    """Answers for the leading programs, up to one that ends the process."""
    request = json.dumps({"programs": list(programs), "inputs": list(inputs)})
    command = [sys.executable, "-I", "-S", "-B", str(CHILD)]
    try:
        answer = subprocess.run(
            command, input=request.encode(), capture_output=True, timeout=SECONDS, env={}
        ).stdout
    except subprocess.TimeoutExpired as expired:
        answer = expired.stdout or b""
    whole = answer[: answer.rfind(b"\n") + 1].splitlines()
    return [json.loads(line) for line in whole[: len(programs)]]
