"""Checks by their names, and many answers at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from moemerge.errors import DataError, UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import cpu_count
from moemerge.verification.cache import CachedVerifier
from moemerge.verification.code_checks import CodeVerifier
from moemerge.verification.custom import CustomVerifier
from moemerge.verification.judgement import Judgement, Row, Verifier
from moemerge.verification.mathematics import MathVerifier
from moemerge.verification.words import ChoiceVerifier, ExactVerifier

NAMES: Final = ("math", "code", "exact", "choice")


def make_verifier(
    name: str, *, allow_code: bool = False, workers: int | None = None, cache: Path | None = None
) -> CachedVerifier:
    """The check of this name, or `module:function`. Close it: it may keep processes."""
    makers: dict[str, Callable[[], Verifier]] = {
        "math": lambda: MathVerifier(workers=workers or cpu_count()),
        "code": lambda: CodeVerifier(allow_code=allow_code),
        "exact": ExactVerifier,
        "choice": ChoiceVerifier,
    }
    assert tuple(makers) == NAMES
    if ":" in name:
        return CachedVerifier(CustomVerifier(name), cache)
    if name not in makers:
        raise UsageError(
            f"unknown check {name!r}{did_you_mean(name, makers)}",
            hint=f"known: {', '.join(makers)}, or MODULE:FUNCTION of your own",
        )
    return CachedVerifier(makers[name](), cache)


def check_rows(verifier: Verifier, rows: Sequence[Row], where: str) -> None:
    """Refuse rows that cannot be judged before anything is generated for them."""
    for number, row in enumerate(rows, 1):
        try:
            verifier.relevant(row)
        except DataError as error:
            raise DataError(f"{where}, row {number}: {error.message}", hint=error.hint) from None


def check_all(
    verifier: Verifier, items: Sequence[tuple[Row, str]], *, workers: int | None = None
) -> list[Judgement]:
    """Judgements of (row, response) pairs in their order, several at a time."""
    with ThreadPoolExecutor(workers or cpu_count()) as pool:
        return list(pool.map(lambda item: verifier.check(*item), items))
