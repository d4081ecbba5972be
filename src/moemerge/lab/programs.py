"""Check programs by running their tests in the sandbox."""

from __future__ import annotations

import ast
import json
import re
import secrets
from dataclasses import dataclass
from typing import Any, Final

from moemerge.errors import DataError, UsageError
from moemerge.lab.judgement import (
    RIGHT,
    ComputedOnce,
    Fields,
    Grade,
    Judgement,
    Verifier,
)
from moemerge.lab.sandbox import Limits, SandboxError, require_sandbox, run_confined

TESTS_HINT: Final = (
    "a row for code has 'tests' (a string or a list of asserts), or is one of HumanEval+ "
    "('test', 'entry_point') or MBPP+ ('test' or 'test_list')"
)
_FENCE: Final = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)
_PYTHON: Final = frozenset({"", "python", "python3", "py"})
# HumanEval+'s OriginFmt release passes the arguments of `_poly` in the wrong order, so no answer
# can pass. Its own base test shows the right order.
_BROKEN: Final = "assert _poly(*candidate(*inp), inp) <= 0.0001"
_MENDED: Final = "assert abs(_poly(*inp, candidate(*inp))) <= 0.0001"


@dataclass(frozen=True)
class Tests:
    """The tests of a program. `preamble` is put before programs that do not repeat it."""

    source: str
    entry_point: str | None = None
    prompt: str = ""  # the prompt, if it is the start of a program
    reference: str | None = None


def row_tests(row: Fields, *, mended: bool = True) -> Tests:
    """Return a row's tests, in any known format; the one that is known to be broken is fixed."""
    entry = row.get("entry_point")
    entry = entry if isinstance(entry, str) and entry else None
    imports = _lines(row.get("test_imports"))
    for name in ("tests", "test", "test_list"):
        source = _lines(row.get(name))
        if source:
            break
    else:
        raise DataError(f"no tests in a row with {', '.join(sorted(row))}", hint=TESTS_HINT)
    source = f"{imports}\n{source}"
    if mended:
        source = source.replace(_BROKEN, _MENDED)
    prompt = str(row.get("prompt", ""))
    if entry and "def check(" in source:
        source += f"\ncheck({entry})\n"
    starts = prompt if entry and f"def {entry}" in prompt else ""
    return Tests(source, entry, starts, _reference(row, starts))


def _reference(row: Fields, starts: str) -> str | None:
    solution = row.get("canonical_solution")
    if isinstance(solution, str):
        return starts + solution
    code = row.get("code", row.get("reference"))
    return code if isinstance(code, str) else None


def _lines(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return ""


def program_of(response: str, tests: Tests) -> str | None:
    """Return the program in a response, or None if there is none.

    Fenced blocks are tried first, starting with the one that defines the function; then the whole
    text, also as a continuation of the prompt.
    """
    blocks: list[str] = [
        code for language, code in _FENCE.findall(response) if language.lower() in _PYTHON
    ]
    # A response that continues an open fence starts with code and ends with the closing fence.
    opened = response.split("\n```", 1)[0]
    whole = [opened, response] if opened != response else [response]
    candidates = [*blocks, "\n".join(blocks), *whole]
    programs = [code for code in candidates if code.strip() and _parses(code)]
    if tests.entry_point:
        for code in programs:
            if any(tests.entry_point in _names(node) for node in ast.parse(code).body):
                return _with_preamble(code, tests)
        for code in candidates:
            if tests.prompt and code.strip() and _parses(tests.prompt + code):
                return tests.prompt + code
    return programs[0] if programs else None


def _with_preamble(code: str, tests: Tests) -> str:
    """Prepend the imports and helpers that the prompt has before the requested function."""
    assert tests.entry_point is not None
    start = re.search(rf"^(async )?def {re.escape(tests.entry_point)}\b", tests.prompt, re.M)
    before = tests.prompt[: start.start()] if start else ""
    # `from __future__` must come first, so a program that has it gets no preamble.
    if not before.strip() or "from __future__" in code:
        return code
    return f"{before}\n{code}"


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


# The time limit follows the row's own solution on this machine.
TIMES_THE_REFERENCE: Final = 4.0
LONGEST_REFERENCE: Final = 300.0


class CodeVerifier(Verifier):
    """Runs the program of a response with the row's tests, if the user allows it."""

    name = "code"

    def __init__(self, *, allow_code: bool, limits: Limits | None = None) -> None:
        if not allow_code:
            raise UsageError(
                "checking code means running programs that a model wrote",
                hint="`allow_code=True` lets them run, in a sandbox",
            )
        require_sandbox()
        self._limits = limits or Limits()
        self._references: ComputedOnce[Tests, float] = ComputedOnce()

    def tests_of(self, row: Fields) -> Tests:
        return row_tests(row)

    def program_of(self, response: str, tests: Tests) -> str | None:
        return program_of(response, tests)

    def relevant(self, row: Fields) -> Any:
        tests = self.tests_of(row)
        return [tests.source, tests.entry_point, tests.prompt, self._limits.cpu_seconds]

    def check(self, row: Fields, response: str) -> Judgement:
        tests = self.tests_of(row)
        program = self.program_of(response, tests)
        if program is None:
            return Judgement(Grade.NO_ANSWER, "no Python program in the response")
        first, _seconds = self._run(program, tests, self._limits)
        if first.grade is not Grade.TIMEOUT or tests.reference is None:
            return first
        # Only slow programs are worth timing the reference.
        needed = TIMES_THE_REFERENCE * self._reference_seconds(tests)
        if needed <= self._limits.cpu_seconds:
            return first
        return self._run(program, tests, self._limits.with_time(needed))[0]

    def _reference_seconds(self, tests: Tests) -> float:
        """Return the time of the reference, measured once. A failing reference adds no time."""

        def measured() -> float:
            assert tests.reference is not None
            limits = self._limits.with_time(LONGEST_REFERENCE)
            judgement, seconds = self._run(tests.reference, tests, limits)
            return seconds if judgement.right else 0.0

        return self._references.get(tests, measured)

    def _run(self, program: str, tests: Tests, limits: Limits) -> tuple[Judgement, float]:
        """Return the judgement of a program, and its processor time in seconds."""
        secret = secrets.token_hex(16)
        try:
            result = run_confined(program, tests.source, secret, limits)
        except (SandboxError, OSError) as error:  # no more processes or memory
            return Judgement(Grade.UNDECIDED, str(error)), 0.0
        if result.timed_out:
            detail = f"stopped after {limits.cpu_seconds:g} s of processor time"
            if result.seconds >= limits.wall_seconds:
                detail = f"stopped after {limits.wall_seconds:g} s on the clock: it waited"
            return Judgement(Grade.TIMEOUT, detail), result.seconds
        report = _report(result.answer, secret)
        if report is None:
            detail = "exited before its tests were done"
            if result.exit_code:
                detail = f"crashed (exit code {result.exit_code})"
            return Judgement(Grade.ERROR, detail), result.seconds
        if report["passed"]:
            return RIGHT, report["seconds"]
        failed = report["detail"].startswith("tests: AssertionError")
        judgement = Judgement(Grade.WRONG if failed else Grade.ERROR, report["detail"])
        return judgement, report["seconds"]


def _report(answer: bytes, secret: str) -> dict[str, Any] | None:
    """Return the harness's report; None if it is missing or the program wrote something else."""
    try:
        report = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) and report.get("secret") == secret else None
