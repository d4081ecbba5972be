"""What a check says of one answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Row = Mapping[str, Any]


class Grade(enum.Enum):
    """The kinds of judgement, as they stand in files and summaries."""

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no answer"  # nothing in the text that could be judged
    ERROR = "error"  # a program that raises, crashes or does not parse
    TIMEOUT = "timeout"
    UNDECIDED = "undecided"  # the check itself failed; says nothing about the answer


@dataclass(frozen=True)
class Judgement:
    """One answer judged; `detail` is one line for people."""

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
    """Judges answers. `check` may be called from several threads at once.

    `relevant` is what a judgement depends on apart from the response; equal content is judged once.
    """

    name: str

    def relevant(self, row: Row) -> Any:
        """The part of a row that is compared with, as JSON; raises DataError where it lacks."""
        ...

    def check(self, row: Row, response: str) -> Judgement: ...

    def close(self) -> None:
        """Ends the processes that it keeps."""
        ...
