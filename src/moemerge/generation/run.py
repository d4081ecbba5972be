"""Completions of many prompts: those that are there already, the rest from an engine; counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moemerge.errors import MoeMergeError, ResourceError
from moemerge.generation.engine import Completion, Engine, Finish, Wanted
from moemerge.generation.journal import CompletionJournal
from moemerge.generation.settings import GenerationSettings
from moemerge.runtime.progress import Progress, counted
from moemerge.verification.judgement import Judgement


@dataclass(frozen=True)
class Generated:
    """All completions, by prompt and sample, and what this run did for them."""

    completions: tuple[tuple[Completion, ...], ...]
    reused: int
    tokens: int
    seconds: float


def complete(
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    make_engine: Callable[[], Engine],
    journal: CompletionJournal,
    progress: Progress,
) -> Generated:
    """`settings.samples` completions of each prompt. The engine is made only when it is needed.

    A failed completion is tried again by the next run.
    """
    finished: dict[tuple[int, int], Completion] = {}
    missing: list[Wanted] = []
    for place, tokens in enumerate(prompts):
        for sample in range(settings.samples):
            known = journal.find(tokens, place, sample)
            if known is not None and known.finish is not Finish.FAILED:
                finished[place, sample] = known
            else:
                missing.append(Wanted(place, sample, tuple(tokens)))
    reused, tokens_made, begun = len(finished), 0, time.monotonic()
    if reused:
        progress.note(
            f"{reused} of {counted(reused + len(missing), 'completion')} are there already"
        )
    if missing:
        engine = make_engine()
        begun = time.monotonic()
        progress.start("generating", len(missing), unit="completions")
        try:
            for completion in engine.generate(missing, reused + len(missing)):
                journal.add(prompts[completion.prompt], completion)
                finished[completion.prompt, completion.sample] = completion
                tokens_made += completion.tokens
                progress.status(_rate(tokens_made, time.monotonic() - begun))
                progress.advance(1)
        except MoeMergeError:
            raise
        except Exception as error:  # whatever a library does when a device or a model fails it
            raise ResourceError(
                f"the engine {engine.name} stopped after {len(finished) - reused} of "
                f"{len(missing)} completions ({type(error).__name__}: {error})",
                hint="they are kept: the same command goes on from there",
            ) from error
        finally:
            progress.finish()
            engine.close()
    completions = tuple(
        tuple(finished[place, sample] for sample in range(settings.samples))
        for place in range(len(prompts))
    )
    return Generated(completions, reused, tokens_made, time.monotonic() - begun)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-9):.0f} tokens/s"


# --- what became of them --------------------------------------------------------------------------


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
