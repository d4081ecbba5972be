"""The result of checking one answer, and the protocol of verifiers."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Fields = Mapping[str, Any]


class Grade(enum.Enum):
    """The grades, as written to files and summaries."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no answer"  # no answer was found in the text
    ERROR = "error"  # a program that raises, crashes or does not parse
    TIMEOUT = "timeout"
    UNDECIDED = "undecided"  # the check itself failed; the answer may be right


@dataclass(frozen=True)
class Judgement:
    """The grade of one answer; `detail` is one line for people."""

    grade: Grade
    detail: str = ""

    @property
    def right(self) -> bool:
        return self.grade is Grade.RIGHT

    def to_json(self) -> dict[str, str]:
        return {"grade": self.grade.value, "detail": self.detail}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Judgement:
        return cls(Grade(values["grade"]), str(values["detail"]))


RIGHT = Judgement(Grade.RIGHT)


class Verifier(Protocol):
    """Checks answers. `check` may be called from several threads at once."""

    name: str

    def relevant(self, row: Fields) -> Any:
        """Return the part of a row that a judgement depends on, as JSON. Raise DataError if it is
        missing.
        """
        ...

    def check(self, row: Fields, response: str) -> Judgement: ...

    def close(self) -> None:
        """End worker processes."""
        ...
