"""Programs judged by their tests, in the sandbox."""

from __future__ import annotations

import json
import secrets
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from moemerge.errors import UsageError
from moemerge.verification.judgement import RIGHT, Grade, Judgement, Row
from moemerge.verification.programs import Tests, program_of, row_tests
from moemerge.verification.sandbox.process import Ended, Limits, Sandbox, SandboxError
from moemerge.verification.sandbox.protections import Protections, strongest

JUDGE: Final = "moemerge.verification.harness:judge"
# A row's own solution says how long its tests take on this machine.
TIMES_THE_REFERENCE: Final = 4.0
LONGEST_REFERENCE: Final = 300.0


@dataclass(frozen=True)
class _ProgramRun:
    judgement: Judgement
    seconds: float  # processor time


class CodeVerifier:
    """`check` runs the program of a response with the row's tests; refused unless allowed."""

    name = "code"

    def __init__(self, *, allow_code: bool, limits: Limits | None = None) -> None:
        if not allow_code:
            raise UsageError(
                "checking code means running programs that a model wrote",
                hint="`allow_code=True` lets them run, in a sandbox",
            )
        self._sandbox: Sandbox
        self.protections: Protections
        self._sandbox, self.protections = strongest()
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._references: dict[Tests, Future[float]] = {}

    def tests_of(self, row: Row) -> Tests:
        return row_tests(row)

    def program_of(self, response: str, tests: Tests) -> str | None:
        return program_of(response, tests)

    def relevant(self, row: Row) -> Any:
        tests = self.tests_of(row)
        return [tests.source, tests.entry_point, tests.prompt, self._limits.cpu_seconds]

    def check(self, row: Row, response: str) -> Judgement:
        tests = self.tests_of(row)
        program = self.program_of(response, tests)
        if program is None:
            return Judgement(Grade.NO_ANSWER, "no Python program in the response")
        first = self._run(program, tests, self._limits)
        if first.judgement.grade is not Grade.TIMEOUT or tests.reference is None:
            return first.judgement
        # Only what takes too long is worth the wait for the reference's own time.
        needed = TIMES_THE_REFERENCE * self._reference_seconds(tests)
        if needed <= self._limits.cpu_seconds:
            return first.judgement
        return self._run(program, tests, self._limits.with_time(needed)).judgement

    def close(self) -> None:
        """Nothing is kept running."""

    def _reference_seconds(self, tests: Tests) -> float:
        """Measured once, whoever asks first; a reference that fails gives no more time."""
        with self._lock:
            future = self._references.get(tests)
            mine = future is None
            if future is None:
                future = self._references[tests] = Future()
        if mine:
            assert tests.reference is not None
            limits = self._limits.with_time(LONGEST_REFERENCE)
            try:
                run = self._run(tests.reference, tests, limits)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(run.seconds if run.judgement.right else 0.0)
        return future.result()

    def _run(self, program: str, tests: Tests, limits: Limits) -> _ProgramRun:
        secret = secrets.token_hex(16)
        job = {"program": program, "tests": tests.source, "secret": secret}
        try:
            result = self._sandbox.run(JUDGE, json.dumps(job).encode(), limits)
        except (SandboxError, OSError) as error:  # a machine out of processes or memory
            return _ProgramRun(Judgement(Grade.UNDECIDED, str(error)), 0.0)
        if result.ended is Ended.TIME:
            detail = f"stopped after {limits.cpu_seconds:g} s of processor time"
            return _ProgramRun(Judgement(Grade.TIMEOUT, detail), result.seconds)
        report = _report(result.answer, secret)
        if report is None:
            why = {
                Ended.KILLED: f"crashed (exit code {result.exit_code})",
                Ended.OUTPUT: "wrote without end",
            }
            detail = why.get(result.ended, "left before its tests were done")
            return _ProgramRun(Judgement(Grade.ERROR, detail), result.seconds)
        if report["passed"]:
            return _ProgramRun(RIGHT, report["seconds"])
        failed = report["detail"].startswith("tests: AssertionError")
        judgement = Judgement(Grade.WRONG if failed else Grade.ERROR, report["detail"])
        return _ProgramRun(judgement, report["seconds"])


def _report(answer: bytes, secret: str) -> dict[str, Any] | None:
    """What the harness said; None where it did not come to say it, or the program spoke instead."""
    try:
        report = json.loads(answer)
    except ValueError:
        return None
    if not isinstance(report, dict) or report.get("secret") != secret:
        return None
    return report
