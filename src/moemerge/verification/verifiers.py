"""Verifiers by name, among them of instructions (IFEval) and custom ones; cached, parallel checks.

A judgement is cached by its content, within a run and, with a file, across runs. Timeouts depend on
the machine's load and undecided grades on its installation, so these two are not written to the
file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from moemerge.errors import DataError, UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import cpu_count
from moemerge.runtime.journals import LineStore
from moemerge.runtime.process import thread_pool
from moemerge.runtime.progress import Progress, Silent
from moemerge.verification.code_checks import CodeVerifier
from moemerge.verification.judgement import RIGHT, ComputedOnce, Fields, Grade, Judgement, Verifier
from moemerge.verification.mathematics import MathVerifier
from moemerge.verification.published import (
    BareMathVerifier,
    LastChoiceVerifier,
    LastNumberVerifier,
    ThreeSecondsVerifier,
)
from moemerge.verification.words import ChoiceVerifier, ExactVerifier
from moemerge.verification.workers import WorkerPool

NAMES: Final = ("math", "code", "exact", "choice", "instructions")
PUBLISHED: Final = ("last-number", "bare-math", "last-choice", "code-3s")


def make_verifier(name: str, *, allow_code: bool = False, workers: int | None = None) -> Verifier:
    """Return the verifier of this name, or of `module:function`. Close it after use."""
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
            hint=f"known: {', '.join(NAMES)}, or your own MODULE:FUNCTION",
        )
    return makers[name]()


def check_rows(verifier: Verifier, rows: Iterable[tuple[str, Fields]]) -> None:
    """Refuse rows that cannot be checked, before answers are generated. Each comes with its
    location.
    """
    for where, row in rows:
        try:
            verifier.relevant(row)
        except DataError as error:
            raise DataError(f"{where}: {error.message}", hint=error.hint) from None


def check_all(
    verifier: Verifier,
    items: Sequence[tuple[Fields, str]],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Judgement]:
    """Return the judgements of (row, response) pairs in order, several at a time."""
    progress = progress or Silent()

    def check(item: tuple[Fields, str]) -> Judgement:
        judgement = verifier.check(*item)
        progress.advance(1)
        return judgement

    progress.start("judging", len(items), unit="answers")
    pool = thread_pool(workers or cpu_count(), "moemerge-judge")
    try:
        return list(pool.map(check, items))
    finally:
        # An interrupted run waits for the running checks, not for all.
        pool.shutdown(cancel_futures=True)
        progress.finish()


class CustomVerifier(Verifier):
    """Calls `function(row, response)` in this process; it returns a bool or a Judgement."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._function = _load(name)
        self._source = _source(self._function)

    def relevant(self, row: Fields) -> Any:
        # The function may use any field, and its code may change.
        return [dict(row), self._source]

    def check(self, row: Fields, response: str) -> Judgement:
        try:
            result = self._function(dict(row), response)
        except Exception as error:  # the user's code may raise anything; the run continues
            return Judgement(Grade.UNDECIDED, f"{self.name}: {type(error).__name__}: {error}")
        if isinstance(result, Judgement):
            return result
        if isinstance(result, bool):
            return RIGHT if result else Judgement(Grade.WRONG)
        raise UsageError(
            f"{self.name} returned {type(result).__name__}, expected True, False or a Judgement"
        )


def _load(name: str) -> Callable[[dict[str, Any], str], object]:
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # `moemerge` is a script: the working folder is not on its path
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything on import
        raise UsageError(
            f"{name}: {module_name} cannot be imported ({type(error).__name__}: {error})",
            hint="give MODULE:FUNCTION; MODULE is in this folder or installed",
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


# --- cache ----------------------------------------------------------------------------------------

JUDGEMENTS_KIND: Final = "moemerge judgements"
LASTING: Final = frozenset(Grade) - {Grade.TIMEOUT, Grade.UNDECIDED}
# Part of every key: raise it when one of our checks changes its judgements.
JUDGEMENTS_EDITION: Final = 1


class CachedVerifier(Verifier):
    """A verifier with a cache, in memory and optionally in a `LineStore`. Thread-safe."""

    def __init__(self, verifier: Verifier, path: Path | None = None) -> None:
        self.name = verifier.name
        self.inner = verifier
        self._lock = threading.Lock()
        self._known: ComputedOnce[str, Judgement] = ComputedOnce()
        self._file: LineStore | None = None
        if path is not None:
            self._file = LineStore(path, {"kind": JUDGEMENTS_KIND, "edition": JUDGEMENTS_EDITION})
            self._load(self._file)

    def relevant(self, row: Fields) -> Any:
        return self.inner.relevant(row)

    def check(self, row: Fields, response: str) -> Judgement:
        key = self._key(row, response)
        return self._known.get(key, lambda: self._judged(key, row, response))

    def close(self) -> None:
        self.inner.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> CachedVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _key(self, row: Fields, response: str) -> str:
        content = [JUDGEMENTS_EDITION, self.name, self.inner.relevant(row), response]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _judged(self, key: str, row: Fields, response: str) -> Judgement:
        judgement = self.inner.check(row, response)
        if self._file is not None and judgement.grade in LASTING:
            with self._lock:
                self._file.add({"key": key, **judgement.to_json()})
        return judgement

    def _load(self, file: LineStore) -> None:
        try:
            for values in file.lines:
                self._known.put(values["key"], Judgement.from_json(values))
        except (ValueError, KeyError, TypeError) as error:
            file.close()
            raise DataError(
                f"{file.path} is damaged ({type(error).__name__}: {error})",
                hint="remove it: its answers are judged again",
            ) from error


INSTRUCTIONS_SECONDS: Final = 20.0  # per answer
NEEDED: Final = ("lm_eval", "nltk", "langdetect", "immutabledict")


class InstructionsVerifier(Verifier):
    """Checks that a response follows all instructions of its row."""

    name = "instructions"

    def __init__(self, *, workers: int = 1, seconds: float = INSTRUCTIONS_SECONDS) -> None:
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(
                f"checking instructions needs {', '.join(missing)}, which is not installed",
                hint='pip install "moemerge[eval]"',
            )
        self._pool = WorkerPool("instructions", size=workers, seconds=seconds)
        self._seconds = seconds

    def relevant(self, row: Fields) -> Any:
        names, given = row.get("instruction_id_list"), row.get("kwargs")
        lists = isinstance(names, list) and isinstance(given, list)
        if not lists or not names or len(names) != len(given or ()):
            raise DataError(
                f"no instructions in a row with {', '.join(sorted(row))}",
                hint="a row of IFEval has 'instruction_id_list' and as many 'kwargs'",
            )
        kept = [{k: v for k, v in (one or {}).items() if v is not None} for one in given or ()]
        return [names, kept, str(row.get("prompt", ""))]

    def check(self, row: Fields, response: str) -> Judgement:
        if not response.strip():
            return Judgement(Grade.NO_ANSWER, "an empty response")
        names, given, prompt = self.relevant(row)
        question = {"names": names, "given": given, "prompt": prompt, "response": response}
        answer = self._pool.ask(question)
        if answer is None:
            return Judgement(Grade.TIMEOUT, f"checking took more than {self._seconds:g} s")
        failed = [name for name, right in zip(names, answer["followed"], strict=True) if not right]
        if answer["error"]:
            return Judgement(Grade.UNDECIDED, answer["error"])
        if not failed:
            return RIGHT
        share = f"{len(names) - len(failed)} of {len(names)} instructions followed"
        return Judgement(Grade.WRONG, f"{share}; not {', '.join(failed)}")

    def close(self) -> None:
        self._pool.close()
