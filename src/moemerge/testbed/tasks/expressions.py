"""Evaluates expressions one by one. Runs inside the sandbox; imports nothing of the package.

Asked {"programs": [...], "inputs": [...]}, it answers one line of JSON per program: a list of
strings, or null.
"""

from __future__ import annotations

import ast
import json
import signal
from collections.abc import Callable
from typing import Any

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
    """A program that is not run."""


def evaluate(request: bytes, answer: Callable[[bytes], None]) -> None:
    asked = json.loads(request)

    def stop(*_: object) -> None:
        raise RefusedError("time")

    signal.signal(signal.SIGALRM, stop)
    for program in asked["programs"]:
        answer(json.dumps(_answer(program, asked["inputs"])).encode() + b"\n")


def _answer(program: str, inputs: list[str]) -> list[str] | None:
    """The results, or None for whatever a program does wrong."""
    try:
        signal.setitimer(signal.ITIMER_REAL, SECONDS_EACH)
        code = compile(_checked(program), "<program>", "eval")
        results = [_run(code, value) for value in inputs]
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Exception:  # a model may write anything, and all of it is simply wrong
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
