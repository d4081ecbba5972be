"""Judge answers under a protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from moemerge.evaluation.answers import AnswersByModel, file_name
from moemerge.evaluation.job import EvaluationJob, PosedTask
from moemerge.evaluation.significance import Array
from moemerge.generation.run import Answer, Counts, count_answers, judge
from moemerge.runtime.files import make_folder
from moemerge.runtime.progress import Progress
from moemerge.verification.code_checks import CodeVerifier
from moemerge.verification.judgement import Verifier
from moemerge.verification.verifiers import CachedVerifier, check_rows, make_verifier


@dataclass(frozen=True)
class ScoredTask:
    """A task with the judged answers of all models: model -> problem -> sample."""

    posed: PosedTask
    answers: Mapping[str, tuple[tuple[Answer, ...], ...]]

    def scores(self) -> Array:
        """Return the share of right samples, (models, problems)."""
        return np.array(
            [
                [sum(one.right for one in samples) / len(samples) for samples in problems]
                for problems in self.answers.values()
            ]
        )

    def counts(self, model: str) -> Counts:
        return count_answers(one for samples in self.answers[model] for one in samples)


@contextmanager
def opened_verifiers(job: EvaluationJob, progress: Progress) -> Iterator[dict[str, Verifier]]:
    """Open the verifier of every task, and refuse rows that it cannot judge."""
    made: dict[str, Verifier] = {}
    with ExitStack() as stack:
        for posed in job.tasks:
            if posed.verify not in made:
                verifier = make_verifier(
                    posed.verify, allow_code=job.settings.allow_code, workers=job.settings.workers
                )
                stack.callback(verifier.close)
                made[posed.verify] = verifier
                if isinstance(verifier, CodeVerifier):
                    for line in verifier.protections.sentences():
                        progress.note(line)
            check_rows(made[posed.verify], [(row.where, row.fields) for row in posed.problems])
        yield {posed.name: made[posed.verify] for posed in job.tasks}


def judge_answers(
    job: EvaluationJob,
    verifiers: Mapping[str, Verifier],
    answers: AnswersByModel,
    progress: Progress,
) -> list[ScoredTask]:
    """Judge all answers. Texts that were judged before are looked up."""
    with ExitStack() as stack:
        cached: dict[str, CachedVerifier] = {}
        for posed in job.tasks:
            if posed.verify not in cached:
                path = make_folder(job.out, "judgements") / f"{file_name(posed.verify)}.jsonl"
                verifier = CachedVerifier(verifiers[posed.name], path)
                cached[posed.verify] = stack.enter_context(verifier)
        return [_scored(job, posed, cached[posed.verify], answers, progress) for posed in job.tasks]


def _scored(
    job: EvaluationJob,
    posed: PosedTask,
    verifier: Verifier,
    answers: AnswersByModel,
    progress: Progress,
) -> ScoredTask:
    prefill, answered = posed.task.settings.prefill, {}
    for model, tasks in answers.items():
        task = tasks[posed.name]
        answered[model] = [
            [Answer(row, one, prefill + one.text, text) for one in samples[: posed.samples]]
            for row, text, samples in zip(
                posed.problems, task.prompts, task.completions, strict=True
            )
        ]
    made = [one for problems in answered.values() for samples in problems for one in samples]
    judged = iter(judge(made, verifier, job.settings.workers, progress))
    return ScoredTask(
        posed,
        {
            model: tuple(tuple(next(judged) for _ in samples) for samples in problems)
            for model, problems in answered.items()
        },
    )
