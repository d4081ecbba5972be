"""Checks by their names, and many answers at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from moemerge.errors import DataError, UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import cpu_count
from moemerge.runtime.process import thread_pool
from moemerge.runtime.progress import Progress, Silent
from moemerge.verification.code_checks import CodeVerifier
from moemerge.verification.custom import CustomVerifier
from moemerge.verification.instructions import InstructionsVerifier
from moemerge.verification.judgement import Judgement, Row, Verifier
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
