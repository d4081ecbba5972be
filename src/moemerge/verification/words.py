"""Check answers that are plain text: an exact match, or the letter of a choice."""

from __future__ import annotations

import re
from string import ascii_uppercase
from typing import Any, Final

from moemerge.errors import DataError
from moemerge.verification.judgement import RIGHT, Fields, Grade, Judgement, Verifier, differing

_STATED: Final = re.compile(r"\banswer\s*(?:is|:|=)+\s*[\"'*_(\[]*([A-Za-z])\b(?![.'’]\w)", re.I)
_BRACKETED: Final = re.compile(r"[(\[]([A-Za-z])[)\]]")
_ALONE: Final = re.compile(r"\s*[\"'*_(\[]*([A-Za-z])(?:[)\].:,*_\"']+|\s*$)")


class ExactVerifier(Verifier):
    """Checks that the response equals the row's `answer`, apart from surrounding space."""

    name = "exact"

    def relevant(self, row: Fields) -> Any:
        return _answer(row)

    def check(self, row: Fields, response: str) -> Judgement:
        expected, given = _answer(row).strip(), response.strip()
        if given == expected:
            return RIGHT
        if not given:
            return Judgement(Grade.NO_ANSWER, "an empty response")
        return differing(given, expected)


class ChoiceVerifier(Verifier):
    """Checks that the response chooses the letter in the row's `answer`.

    The last "the answer is X" counts, then the last (X), then a letter at the start of the
    response.
    """

    name = "choice"

    def relevant(self, row: Fields) -> Any:
        answer, choices = row.get("answer"), row.get("choices")
        if isinstance(answer, int) and isinstance(choices, list) and 0 <= answer < len(choices):
            return ascii_uppercase[answer]  # an index, as in many data sets
        letter = _answer(row).strip().strip("()[].").upper()
        if len(letter) != 1 or not letter.isalpha():
            raise DataError(f"'answer' is {letter[:40]!r}, expected one letter, such as B")
        return letter

    def check(self, row: Fields, response: str) -> Judgement:
        expected, given = self.relevant(row), chosen(response)
        if given is None:
            return Judgement(Grade.NO_ANSWER, "no choice in the response")
        if given == expected:
            return RIGHT
        return Judgement(Grade.WRONG, f"{given} instead of {expected}")


def chosen(response: str) -> str | None:
    """Return the letter that a response chooses, in upper case."""
    letters = _STATED.findall(response) or _BRACKETED.findall(response)
    if letters:
        return str(letters[-1]).upper()
    alone = _ALONE.match(response)
    return alone[1].upper() if alone else None


def _answer(row: Fields) -> str:
    answer = row.get("answer")
    if not isinstance(answer, str):
        raise DataError(
            f"'answer' is {type(answer).__name__}, expected a string",
            hint='name the column that holds it: `map={"answer": COLUMN}`',
        )
    return answer
