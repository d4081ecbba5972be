"""Verifiers by name, including instructions (IFEval) and custom ones; cached, parallel checks.

A judgement is cached by its content, within a run and across runs. Timeouts depend on
the machine's load and undecided grades on its installation, so these two are not written to the
file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final

from moemerge.errors import DataError, UsageError
from moemerge.lab.checkers import WorkerPool
from moemerge.lab.judgement import (
    RIGHT,
    ComputedOnce,
    Fields,
    Grade,
    Judgement,
    Verifier,
    compare_texts,
)
from moemerge.lab.mathematics import MathVerifier, text_answer
from moemerge.lab.programs import CodeVerifier, Tests, row_tests
from moemerge.lab.sandbox import Limits
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import cpu_count
from moemerge.runtime.journals import LineStore
from moemerge.runtime.progress import Progress, Silent

NAMES: Final = ("math", "code", "exact", "choice", "instructions")


def make_verifier(
    name: str,
    *,
    allow_code: bool = False,
    workers: int | None = None,
) -> Verifier:
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
    pool = ThreadPoolExecutor(workers or cpu_count(), "moemerge-judge")
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
    """A verifier with a cache, in memory and in a file. Thread-safe."""

    def __init__(self, verifier: Verifier, path: Path) -> None:
        self.name = verifier.name
        self.inner = verifier
        self._lock = threading.Lock()
        self._known: ComputedOnce[str, Judgement] = ComputedOnce()
        self._file = LineStore(path, {"kind": JUDGEMENTS_KIND, "edition": JUDGEMENTS_EDITION})
        try:
            for values in self._file.lines:
                judgement = Judgement(Grade(values["grade"]), str(values["detail"]))
                self._known.put(values["key"], judgement)
        except (ValueError, KeyError, TypeError) as error:
            self._file.close()
            raise DataError(
                f"{path} is damaged ({type(error).__name__}: {error})",
                hint="remove it: its answers are judged again",
            ) from error

    def relevant(self, row: Fields) -> Any:
        return self.inner.relevant(row)

    def check(self, row: Fields, response: str) -> Judgement:
        key = self._key(row, response)
        return self._known.get(key, lambda: self._judged(key, row, response))

    def close(self) -> None:
        self.inner.close()
        self._file.close()

    def _key(self, row: Fields, response: str) -> str:
        content = [JUDGEMENTS_EDITION, self.name, self.inner.relevant(row), response]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _judged(self, key: str, row: Fields, response: str) -> Judgement:
        judgement = self.inner.check(row, response)
        if judgement.grade in LASTING:
            with self._lock:
                self._file.add({"key": key, **vars(judgement)})
        return judgement


INSTRUCTIONS_SECONDS: Final = 20.0  # per answer
NEEDED: Final = ("lm_eval", "nltk", "langdetect", "immutabledict")


class InstructionsVerifier(Verifier):
    """Checks that a response follows all instructions of its row."""

    name = "instructions"

    def __init__(self, *, workers: int = 1) -> None:
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(
                f"checking instructions needs {', '.join(missing)}, which is not installed",
                hint='pip install "moemerge[eval]"',
            )
        self._pool = WorkerPool("instructions", size=workers, seconds=INSTRUCTIONS_SECONDS)

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
            return Judgement(Grade.TIMEOUT, f"checking took more than {INSTRUCTIONS_SECONDS:g} s")
        failed = [name for name, right in zip(names, answer["followed"], strict=True) if not right]
        if answer["error"]:
            return Judgement(Grade.UNDECIDED, answer["error"])
        if not failed:
            return RIGHT
        share = f"{len(names) - len(failed)} of {len(names)} instructions followed"
        return Judgement(Grade.WRONG, f"{share}; not {', '.join(failed)}")

    def close(self) -> None:
        self._pool.close()


# --- plain text: an exact match, or the letter of a choice ----------------------------------------

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
        if expected and not given:
            return Judgement(Grade.NO_ANSWER, "an empty response")
        return compare_texts(given, expected)


class ChoiceVerifier(Verifier):
    """Checks that the response chooses the letter in the row's `answer`.

    The last "the answer is X" counts, then the last (X), then a letter at the start of the
    response.
    """

    name = "choice"
    nothing = "no choice in the response"

    def chosen(self, response: str) -> str | None:
        """Return the letter that a response chooses, in upper case."""
        letters = _STATED.findall(response) or _BRACKETED.findall(response)
        if letters:
            return str(letters[-1]).upper()
        alone = _ALONE.match(response)
        return alone[1].upper() if alone else None

    def relevant(self, row: Fields) -> Any:
        answer, choices = row.get("answer"), row.get("choices")
        if isinstance(answer, int) and isinstance(choices, list) and 0 <= answer < len(choices):
            return ascii_uppercase[answer]  # an index, as in many data sets
        letter = _answer(row).strip().strip("()[].").upper()
        if len(letter) != 1 or not letter.isalpha():
            raise DataError(f"'answer' is {letter[:40]!r}, expected one letter, such as B")
        return letter

    def check(self, row: Fields, response: str) -> Judgement:
        expected, given = self.relevant(row), self.chosen(response)
        if given is None:
            return Judgement(Grade.NO_ANSWER, self.nothing)
        if given == expected:
            return RIGHT
        return Judgement(Grade.WRONG, f"{given} instead of {expected}")


def _answer(row: Fields) -> str:
    answer = row.get("answer")
    if not isinstance(answer, str):
        raise DataError(
            f"'answer' is {type(answer).__name__}, expected a string",
            hint='name the column that holds it: `map={"answer": COLUMN}`',
        )
    return answer


# --- the checks of the paper's authors with their faults, which docs/evaluate.md lists ------------

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
        return compare_texts(_bare(numbers[-1]), _bare(self.relevant(row)))


def _bare(number: str) -> str:
    """Remove commas, dollar signs and a final point."""
    return re.sub(r"\.$", "", number.replace(",", "").replace("$", ""))


class BareMathVerifier(MathVerifier):
    """math-verify with a bare gold answer: it reads 3√13 as 3, and many answers not at all."""

    name = "bare-math"

    def relevant(self, row: Fields) -> Any:
        return text_answer(row)

    def check(self, row: Fields, response: str) -> Judgement:
        return self._compare_formulas(gold=text_answer(row), texts=[response], bare=True)


class LastChoiceVerifier(ChoiceVerifier):
    """Takes the last (X), whatever the text states about it."""

    name = "last-choice"
    nothing = "no (X) in the response"

    def chosen(self, response: str) -> str | None:
        letters = _CHOICE.findall(response)
        return letters[-1] if letters else None


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
