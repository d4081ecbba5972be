"""Evaluate expressions. `checking.py` runs this file as a script.

The request on stdin is {"programs": [...], "inputs": [...]}. stdout gets one line of JSON for each
program: a list of strings, or null.
"""

from __future__ import annotations

import ast
import contextlib
import json
import resource
import signal
import sys
from typing import Any

# Per process; a thousand correct programs take a tenth of a second.
MEMORY, SECONDS = 1 << 29, 5
SECONDS_EACH = 0.2
LONGEST_PROGRAM = 200
LONGEST_RESULT = 1000
METHODS = frozenset({"upper", "lower", "title", "swapcase", "capitalize"})
FUNCTIONS: dict[str, Any] = {"len": len, "str": str, "sorted": sorted, "reversed": reversed}
NODES = (
    ast.Expression, ast.Load, ast.Name, ast.Constant, ast.Subscript, ast.Slice, ast.UnaryOp,
    ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Call, ast.Attribute,
)  # fmt: skip


class RefusedError(Exception):
    """A program that is rejected."""


def main() -> None:
    content = json.load(sys.stdin)
    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, SECONDS)):
        hard = resource.getrlimit(kind)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with contextlib.suppress(ValueError):  # macOS has no limit on memory
            resource.setrlimit(kind, (bound, bound))

    def stop(*_: object) -> None:
        raise RefusedError("time")

    signal.signal(signal.SIGALRM, stop)
    for program in content["programs"]:
        sys.stdout.write(json.dumps(_answer(program, content["inputs"])) + "\n")
        sys.stdout.flush()


def _answer(program: str, inputs: list[str]) -> list[str] | None:
    """Return a program's results, or None if it fails."""
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS_EACH)
        code = compile(_checked(program), "<program>", "eval")
        results = [_run(code, value) for value in inputs]
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Exception:  # models write arbitrary programs, and any failure is a wrong answer
        signal.setitimer(signal.ITIMER_REAL, 0)
        return None
    return results


def _checked(program: str) -> ast.Expression:
    if len(program) > LONGEST_PROGRAM:
        raise RefusedError("length")
    tree = ast.parse(program, mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, NODES):
            raise RefusedError(type(node).__name__)
        if isinstance(node, ast.Attribute) and node.attr not in METHODS:
            raise RefusedError(node.attr)
        if isinstance(node, ast.Name) and node.id not in {"s", *FUNCTIONS}:
            raise RefusedError(node.id)
    return tree


def _run(code: Any, value: str) -> str:
    result = eval(code, {"__builtins__": {}, **FUNCTIONS, "s": value})
    if not isinstance(result, str) or len(result) > LONGEST_RESULT:
        raise RefusedError("result")
    return result


if __name__ == "__main__":
    main()
