"""Answers counted by what became of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moemerge.generation.engine import Completion, Finish
from moemerge.verification.judgement import Judgement


@dataclass(frozen=True)
class Counts:
    """Answers of some prompts, by what became of them."""

    asked: int = 0  # completions that were wanted
    answered: int = 0  # that ended by themselves
    cut: int = 0  # at the most tokens, or at the end of the context
    failed: int = 0  # not made at all
    grades: Mapping[str, int] = field(default_factory=dict)  # of those that were judged

    @property
    def right(self) -> int:
        return self.grades.get("right", 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "answered": self.answered,
            "cut": self.cut,
            "failed": self.failed,
            "grades": dict(self.grades),
        }


def count(answers: Iterable[tuple[Completion, Judgement | None]]) -> Counts:
    answers = list(answers)
    finishes = Counter(completion.finish for completion, _ in answers)
    grades = Counter(judged.grade.value for _, judged in answers if judged is not None)
    return Counts(
        asked=len(answers),
        answered=finishes[Finish.STOP],
        cut=finishes[Finish.LENGTH],
        failed=finishes[Finish.FAILED],
        grades=dict(grades.most_common()),
    )
