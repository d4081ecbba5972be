"""What became of the prompts and their answers."""

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


@dataclass(frozen=True)
class DataReport:
    """What `moemerge data` read, left out, asked, and kept."""

    output: str
    keep: str
    verify: str
    read: int  # rows of all files
    repeated: int  # prompts left out as repetitions of others
    contaminated: Mapping[str, int]  # prompts left out, by the benchmark that holds them too
    prompts: int  # that were taken
    answers: Counts
    by_group: Mapping[str, Counts]
    kept: int
    kept_by_group: Mapping[str, int]
    reused: int  # completions of a run before
    tokens: int  # generated in this run
    seconds: float
    generating_seconds: float
    notices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "output": self.output,
            "keep": self.keep,
            "verify": self.verify,
            "read": self.read,
            "repeated": self.repeated,
            "contaminated": dict(self.contaminated),
            "prompts": self.prompts,
            "answers": self.answers.to_json(),
            "by_group": {name: counts.to_json() for name, counts in self.by_group.items()},
            "kept": self.kept,
            "kept_by_group": dict(self.kept_by_group),
            "reused": self.reused,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(self.generating_seconds, 1e-9), 1),
            "seconds": round(self.seconds, 3),
            "notices": list(self.notices),
        }
