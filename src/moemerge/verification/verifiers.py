"""Checks by their names, also functions of the user's own, and many answers at once."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from moemerge.errors import DataError, UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import cpu_count
from moemerge.runtime.process import thread_pool
from moemerge.runtime.progress import Progress, Silent
from moemerge.verification.code_checks import CodeVerifier
from moemerge.verification.instructions import InstructionsVerifier
from moemerge.verification.judgement import RIGHT, Grade, Judgement, Row, Verifier
from moemerge.verification.mathematics import MathVerifier
from moemerge.verification.published import (
    BareMathVerifier,
    LastChoiceVerifier,
    LastNumberVerifier,
    ThreeSecondsVerifier,
)
from moemerge.verification.words import ChoiceVerifier, ExactVerifier

NAMES: Final = ("math", "code", "exact", "choice", "instructions")
PUBLISHED: Final = ("last-number", "bare-math", "last-choice", "code-3s")


def make_verifier(name: str, *, allow_code: bool = False, workers: int | None = None) -> Verifier:
    """The check of this name, or `module:function`. Close it: it may keep processes."""
    makers: dict[str, Callable[[], Verifier]] = {
        "math": lambda: MathVerifier(workers=workers or cpu_count()),
        "code": lambda: CodeVerifier(allow_code=allow_code),
        "exact": ExactVerifier,
        "choice": ChoiceVerifier,
        "instructions": lambda: InstructionsVerifier(workers=workers or cpu_count()),
        "last-number": LastNumberVerifier,
        "bare-math": lambda: BareMathVerifier(workers=workers or cpu_count()),
        "last-choice": LastChoiceVerifier,
        "code-3s": lambda: ThreeSecondsVerifier(allow_code=allow_code),
    }
    assert tuple(makers) == NAMES + PUBLISHED
    if ":" in name:
        return CustomVerifier(name)
    if name not in makers:
        raise UsageError(
            f"unknown check {name!r}{did_you_mean(name, makers)}",
            hint=f"known: {', '.join(NAMES)}, or MODULE:FUNCTION of your own",
        )
    return makers[name]()


def check_rows(verifier: Verifier, rows: Iterable[tuple[str, Row]]) -> None:
    """Refuse rows, given with where they stand, that cannot be judged: before anything is
    generated for them."""
    for where, row in rows:
        try:
            verifier.relevant(row)
        except DataError as error:
            raise DataError(f"{where}: {error.message}", hint=error.hint) from None


def check_all(
    verifier: Verifier,
    items: Sequence[tuple[Row, str]],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Judgement]:
    """Judgements of (row, response) pairs in their order, several at a time."""
    progress = progress or Silent()

    def check(item: tuple[Row, str]) -> Judgement:
        judgement = verifier.check(*item)
        progress.advance(1)
        return judgement

    progress.start("judging", len(items), unit="answers")
    pool = thread_pool(workers or cpu_count(), "moemerge-judge")
    try:
        return list(pool.map(check, items))
    finally:
        # An interrupted run waits for the answers in hand, not for all.
        pool.shutdown(cancel_futures=True)
        progress.finish()


class CustomVerifier:
    """`function(row, response)` returns a bool or a Judgement; it runs in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = _load(name)
        self._source = _source(self._function)

    def relevant(self, row: Row) -> Any:
        # Which fields the function looks at is its own business; its text may change.
        return [dict(row), self._source]

    def check(self, row: Row, response: str) -> Judgement:
        try:
            result = self._function(dict(row), response)
        except Exception as error:  # the user's code may raise anything; the run goes on
            return Judgement(Grade.UNDECIDED, f"{self.name}: {type(error).__name__}: {error}")
        if isinstance(result, Judgement):
            return result
        if isinstance(result, bool):
            return RIGHT if result else Judgement(Grade.WRONG)
        raise UsageError(
            f"{self.name} returned {type(result).__name__}, expected True, False or a Judgement"
        )

    def close(self) -> None:
        """Nothing is kept running."""


def _load(name: str) -> Callable[[dict[str, Any], str], object]:
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # `moemerge` is a program: the user's folder is not on its path
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise UsageError(
            f"{name}: {module_name} cannot be imported ({type(error).__name__}: {error})",
            hint="give MODULE:FUNCTION; MODULE lies in this folder or is installed",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(
            f"{name}: {module_name} has no function {function_name!r}",
            hint="give MODULE:FUNCTION; the function takes a row (dict) and a response (str)",
        )
    checked: Callable[[dict[str, Any], str], object] = function
    return checked


def _source(function: Callable[..., object]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return repr(function)
