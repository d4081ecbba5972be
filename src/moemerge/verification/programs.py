"""From a row and a response to a program and its tests."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any, Final

from moemerge.errors import DataError
from moemerge.verification.judgement import Row

FORMS: Final = (
    "a row for code has 'tests' (a string or a list of asserts), or is one of HumanEval+ "
    "('test', 'entry_point') or MBPP+ ('test' or 'test_list')"
)
_FENCE: Final = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.M | re.S)
_PYTHON: Final = frozenset({"", "python", "python3", "py"})
# HumanEval+'s OriginFmt release asks for the polynomial's value of the answer the wrong way round,
# so that no answer can pass. Its own base test says what is meant.
_BROKEN: Final = "assert _poly(*candidate(*inp), inp) <= 0.0001"
_MENDED: Final = "assert abs(_poly(*inp, candidate(*inp))) <= 0.0001"


@dataclass(frozen=True)
class Tests:
    """What a program must pass. `preamble` stands before programs that do not repeat it."""

    source: str
    entry_point: str | None = None
    prompt: str = ""  # the start of a program, where the prompt is one
    reference: str | None = None


def row_tests(row: Row, *, mended: bool = True) -> Tests:
    """A row's tests, in any of the forms that are known; one that is broken is mended."""
    entry = row.get("entry_point")
    entry = entry if isinstance(entry, str) and entry else None
    imports = _lines(row.get("test_imports"))
    for name in ("tests", "test", "test_list"):
        source = _lines(row.get(name))
        if source:
            break
    else:
        raise DataError(f"no tests in a row with {', '.join(sorted(row))}", hint=FORMS)
    source = f"{imports}\n{source}"
    if mended:
        source = source.replace(_BROKEN, _MENDED)
    prompt = str(row.get("prompt", ""))
    if entry and "def check(" in source:
        source += f"\ncheck({entry})\n"
    starts = prompt if entry and f"def {entry}" in prompt else ""
    return Tests(source, entry, starts, _reference(row, starts))


def _reference(row: Row, starts: str) -> str | None:
    solution = row.get("canonical_solution")
    if isinstance(solution, str):
        return starts + solution
    code = row.get("code", row.get("reference"))
    return code if isinstance(code, str) else None


def _lines(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return ""


def program_of(response: str, tests: Tests) -> str | None:
    """The program that a response holds; None where nothing in it is one.

    Fenced blocks are looked at first, the one that defines the function before the others, then
    the whole text, which may also go on where the prompt ends.
    """
    blocks: list[str] = [
        code for language, code in _FENCE.findall(response) if language.lower() in _PYTHON
    ]
    # A response that continues an opened fence begins with code and ends with the closing one.
    opened = response.split("\n```", 1)[0]
    whole = [opened, response] if opened != response else [response]
    candidates = [*blocks, "\n".join(blocks), *whole]
    programs = [code for code in candidates if code.strip() and _parses(code)]
    if tests.entry_point:
        defining = [code for code in programs if _defines(code, tests.entry_point)]
        if defining:
            return _with_preamble(defining[0], tests)
        for code in candidates:
            if tests.prompt and code.strip() and _parses(tests.prompt + code):
                return tests.prompt + code
    return programs[0] if programs else None


def _with_preamble(code: str, tests: Tests) -> str:
    """The imports and helpers that a prompt gives before the function that is asked for."""
    assert tests.entry_point is not None
    start = re.search(rf"^(async )?def {re.escape(tests.entry_point)}\b", tests.prompt, re.M)
    before = tests.prompt[: start.start()] if start else ""
    # `from __future__` must come first, so a program with one keeps its own beginning.
    if not before.strip() or "from __future__" in code:
        return code
    return f"{before}\n{code}"


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _defines(code: str, name: str) -> bool:
    return any(name in _names(node) for node in ast.parse(code).body)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
