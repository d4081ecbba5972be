"""The result of checking one answer, and the interface of verifiers."""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

Fields = Mapping[str, Any]


class Grade(enum.StrEnum):
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


RIGHT = Judgement(Grade.RIGHT)
SHOWN = 40  # characters of a text in a judgement


def compare_texts(given: str, expected: str) -> Judgement:
    """Return whether two texts are equal; if not, with both around the place where they differ."""
    if given == expected:
        return RIGHT
    pairs = enumerate(zip(given, expected, strict=False))
    same = next((n for n, (a, b) in pairs if a != b), min(len(given), len(expected)))
    start = max(0, same - SHOWN // 2)
    cut = slice(start, start + SHOWN)
    return Judgement(Grade.WRONG, f"{given[cut]!r} instead of {expected[cut]!r}")


class Verifier(ABC):
    """Checks answers. `check` may be called from several threads at once."""

    name: str

    @abstractmethod
    def relevant(self, row: Fields) -> Any:
        """Return the part of a row that a judgement depends on, as JSON. Raise DataError if it is
        missing.
        """

    @abstractmethod
    def check(self, row: Fields, response: str) -> Judgement: ...

    def close(self) -> None:  # noqa: B027  (most verifiers keep no process)
        """End worker processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


K = TypeVar("K")
V = TypeVar("V")


class ComputedOnce(Generic[K, V]):
    """Values by key. Each is computed once, also if several threads request it together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[K, Future[V]] = {}

    def put(self, key: K, value: V) -> None:
        self._known[key] = Future()
        self._known[key].set_result(value)

    def get(self, key: K, compute: Callable[[], V]) -> V:
        with self._lock:
            future = self._known.get(key)
            mine = future is None
            if future is None:
                future = self._known[key] = Future()
        if mine:
            try:
                future.set_result(compute())
            except BaseException as error:
                with self._lock:
                    del self._known[key]
                future.set_exception(error)
                raise
        return future.result()
