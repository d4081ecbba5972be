"""The checks of the paper's authors with their faults, for comparison with its tables.

docs/evaluate.md lists the fault of each.
"""

from __future__ import annotations

import re
from typing import Any, Final

from moemerge.verification.code_checks import CodeVerifier, Tests, row_tests
from moemerge.verification.judgement import RIGHT, Fields, Grade, Judgement, Verifier, differing
from moemerge.verification.mathematics import MathVerifier, text_answer
from moemerge.verification.sandbox.process import Limits
from moemerge.verification.words import ChoiceVerifier

_NUMBER: Final = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_CHOICE: Final = re.compile(r"\(([A-Z])\)")
_SECONDS: Final = 3.0


class LastNumberVerifier(Verifier):
    """Compares the text of the last number: 18.00 is not 18, and `...` is a number."""

    name = "last-number"

    def relevant(self, row: Fields) -> Any:
        return text_answer(row).rsplit("####", 1)[-1].strip()

    def check(self, row: Fields, response: str) -> Judgement:
        numbers = [first or second for first, second in _NUMBER.findall(response)]
        if not numbers:
            return Judgement(Grade.NO_ANSWER, "no number in the response")
        given, expected = _bare(numbers[-1]), _bare(self.relevant(row))
        if given == expected:
            return RIGHT
        return differing(given, expected)


def _bare(number: str) -> str:
    """Remove commas, dollar signs and a final point."""
    return re.sub(r"\.$", "", number.replace(",", "").replace("$", ""))


class BareMathVerifier(MathVerifier):
    """math-verify with a bare gold answer: it reads 3√13 as 3, and many answers not at all."""

    name = "bare-math"

    def relevant(self, row: Fields) -> Any:
        return text_answer(row)

    def check(self, row: Fields, response: str) -> Judgement:
        answer = self._pool.ask({"gold": text_answer(row), "texts": [response], "bare": True})
        if answer is None:
            return Judgement(Grade.TIMEOUT, f"math-verify took more than {self._seconds:g} s")
        return Judgement(Grade(answer["grade"]))


class LastChoiceVerifier(ChoiceVerifier):
    """Takes the last (X), whatever the text states about it."""

    name = "last-choice"

    def check(self, row: Fields, response: str) -> Judgement:
        letters, expected = _CHOICE.findall(response), self.relevant(row)
        if not letters:
            return Judgement(Grade.NO_ANSWER, "no (X) in the response")
        if letters[-1] == expected:
            return RIGHT
        return Judgement(Grade.WRONG, f"{letters[-1]} instead of {expected}")


class ThreeSecondsVerifier(CodeVerifier):
    """Runs the text before the next fence, for three seconds on any machine. It uses HumanEval/32's
    test as released, which no program passes.
    """

    name = "code-3s"

    def __init__(self, *, allow_code: bool) -> None:
        limits = Limits(cpu_seconds=_SECONDS, wall_seconds=_SECONDS)
        super().__init__(allow_code=allow_code, limits=limits)

    def tests_of(self, row: Fields) -> Tests:
        tests = row_tests(row, mended=False)
        return Tests(tests.source, tests.entry_point)  # without a reference the limit is fixed

    def program_of(self, response: str, tests: Tests) -> str | None:
        """Return the text up to the next fence; the prompt has opened the first one."""
        code = response.split("```python\n", 1)[-1].split("```", 1)[0]
        return code if code.strip() else None
