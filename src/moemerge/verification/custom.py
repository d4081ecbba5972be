"""A check of the user's own: `module:function`, called with a row and a response."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moemerge.errors import UsageError
from moemerge.verification.judgement import RIGHT, Grade, Judgement, Row


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
