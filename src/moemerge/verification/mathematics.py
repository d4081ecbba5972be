"""Answers to mathematical problems: where in a text they stand, and whether they are right.

Plain numbers are compared by their value, formulas by math-verify.
"""

from __future__ import annotations

import importlib.util
import re
from fractions import Fraction
from typing import Any, Final

from moemerge.errors import DataError, UsageError
from moemerge.verification.judgement import RIGHT, Grade, Judgement, Row
from moemerge.verification.quantities import (
    conflict,
    numbers_in,
    plain_number,
    value,
    without_units,
)
from moemerge.verification.workers import WorkerPool

SECONDS: Final = 10.0  # for one answer; the slowest of MATH-500 takes a tenth of one
LONGEST: Final = 100_000  # characters of a response; the answer stands at its end
_ASSIGNED: Final = re.compile(r"^\s*[A-Za-z]\w{0,8}\s*=\s*")
_BASE: Final = re.compile(r"\d_\{?(\d+)\}?$")
_COMMAND: Final = re.compile(r"\\[A-Za-z]")


class MathVerifier:
    """`check` compares the final answer of a response with the row's `answer`."""

    name = "math"

    def __init__(self, *, workers: int = 1, seconds: float = SECONDS) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "checking mathematical answers needs the package math-verify",
                hint='pip install "moemerge[eval]"',
            )
        module = "moemerge.verification.math_worker"
        self._pool = WorkerPool(module, size=workers, seconds=seconds)
        self._seconds = seconds

    def relevant(self, row: Row) -> Any:
        return gold_of(row)

    def check(self, row: Row, response: str) -> Judgement:
        gold, response = gold_of(row), response[-LONGEST:]
        number = plain_number(gold)
        if number is not None:
            judgement = compare_numbers(number, response)
            if judgement is not None:
                return judgement
        texts = _candidates(response)
        answer = self._pool.ask({"gold": gold, "texts": texts})
        if answer is None:
            return Judgement(Grade.TIMEOUT, f"math-verify took more than {self._seconds:g} s")
        grade = Grade(answer["grade"])
        if grade is Grade.RIGHT:
            given = (boxed(response) or [stated(response) or ""])[-1]
            if conflict(gold, given):
                return Judgement(Grade.WRONG, "another unit")
            return Judgement(Grade.WRONG, "another base") if _bases(gold, given) else RIGHT
        if grade is Grade.UNDECIDED:
            return Judgement(grade, f"the row's answer cannot be read: {gold[:80]}")
        return Judgement(grade)

    def close(self) -> None:
        self._pool.close()


def text_answer(row: Row) -> str:
    """The row's answer as it stands."""
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"'answer' is {type(answer).__name__}, expected a string or a number",
            hint='name the column that holds it: `map={"answer": COLUMN}`',
        )
    return str(answer)


def gold_of(row: Row) -> str:
    """The row's answer: what follows `####`, stands in its last box, or all of it."""
    text = text_answer(row)
    if "####" in text:
        text = text.rsplit("####", 1)[1]
    boxes = boxed(text)
    text = (boxes[-1] if boxes else text).strip().strip("$").strip()
    if not text:
        raise DataError("'answer' is empty, expected what a right response ends with")
    return text


def compare_numbers(gold: Fraction, response: str) -> Judgement | None:
    """Against a plain number; None where the response's answer is a formula instead."""
    boxes = boxed(response)
    if boxes:
        number = plain_number(_ASSIGNED.sub("", without_units(boxes[-1])))
        return None if number is None else _compared(gold, number, "%" in boxes[-1])
    clause = stated(response)
    place = clause if clause is not None and numbers_in(clause) else last_line(response)
    if _COMMAND.search(place):
        return None
    numbers = numbers_in(place) or numbers_in(response)
    if not numbers:
        return Judgement(Grade.NO_ANSWER, "no number in the response")
    # After "the answer is" the number comes first, unless it is computed there.
    first = place is clause and "=" not in place
    match = numbers[0 if first else -1]
    number = value(match)
    return None if number is None else _compared(gold, number, match["percent"] is not None)


def _compared(gold: Fraction, number: Fraction, percent: bool) -> Judgement:
    if number == gold or (percent and number / 100 == gold):
        return RIGHT
    return Judgement(Grade.WRONG, f"{_shown(number)} instead of {_shown(gold)}")


def _bases(gold: str, given: str) -> bool:
    """Whether 52_8 meets 52_5: math-verify reads the base as part of a name."""
    bases = [_BASE.search(text.strip(" $.")) for text in (gold, given)]
    return bases[0] is not None and bases[1] is not None and bases[0][1] != bases[1][1]


def _shown(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):g}"


def _candidates(response: str) -> list[str]:
    """Texts to look for the answer in, the likeliest first."""
    boxes, clause = boxed(response), stated(response)
    if boxes:
        # Two boxes may be two roots, or a first try and its correction.
        return [response, f"\\boxed{{{boxes[-1]}}}"] if len(boxes) > 1 else [response]
    if "$" in response or "\\(" in response or "\\[" in response:
        return [response]
    # A formula without any marks is read as one.
    return [f"${clause or last_line(response)}$", response]


# --- where the answer stands ----------------------------------------------------------------------

_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK: Final = re.compile(r"####[ \t]*([^\n]*)")
_PHRASE: Final = re.compile(r"\banswer\s*(?:is|:|=)+\s*:?\s*", re.I)
# A clause ends with its line or its sentence; the dot of 3.5 ends neither.
_END: Final = re.compile(r"\n|[.!?](?=\s|$)")


def boxed(text: str) -> list[str]:
    """The contents of every \\boxed{...}, braces balanced; one that never closes is left out."""
    return [
        content
        for match in _BOX.finditer(text)
        if (content := _balanced(text, match.end())) is not None
    ]


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for place in range(start, len(text)):
        if text[place] == "\\":
            continue
        escaped = text[place - 1] == "\\"
        if text[place] == "{" and not escaped:
            depth += 1
        elif text[place] == "}" and not escaped:
            depth -= 1
            if depth == 0:
                return text[start:place]
    return None


def stated(text: str) -> str | None:
    """What follows the last `####` or "the answer is"; None where neither stands."""
    marks = _MARK.findall(text)
    if marks and marks[-1].strip():
        return str(marks[-1]).strip()
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return None
    rest = text[phrases[-1].end() :]
    end = _END.search(rest)
    clause = rest[: end.start()] if end else rest
    return clause.strip(" *_`") or None


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
