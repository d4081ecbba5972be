"""Run an evaluation from a request to its report and results folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from moemerge.config.models import ModelLike
from moemerge.evaluation.answers import (
    AnswersByModel,
    ScoredTask,
    answer,
    failures,
    file_name,
    judge_answers,
    opened_verifiers,
    prompt_model,
    recall,
    remaining_work,
)
from moemerge.evaluation.bridge import bridged_scores, require_lm_eval
from moemerge.evaluation.job import EvaluationJob, EvaluationRequest, generation_settings, prepare
from moemerge.evaluation.page import check_cards, page_document, write_cards
from moemerge.evaluation.perplexity import measure_texts
from moemerge.evaluation.report import EvaluationReport, TaskScores, compare_models
from moemerge.evaluation.settings import EvaluationSettings
from moemerge.lockstep.output_files import earlier_report
from moemerge.report.files import report_bytes, report_document
from moemerge.report.scores import write_scores_page
from moemerge.runtime.files import make_folder, write_whole
from moemerge.runtime.outputs import FileKind, check_output_file
from moemerge.runtime.progress import Progress, counted
from moemerge.text.rows import write_rows

RESULTS = "results.json"


def run_evaluation(request: EvaluationRequest, progress: Progress) -> EvaluationReport:
    """Let models answer, judge the answers, and compare. Run it again to resume a killed run."""
    begun = time.monotonic()
    job = prepare(request)
    if request.output.lm_eval:
        require_lm_eval()
    if request.output.report is not None:
        check_output_file(
            request.output.report,
            FileKind.PAGE,
            overwrite=request.output.overwrite,
            inputs=(*request.models, *chain(*request.data.values())),
            what="the report",
        )
    if request.output.card:
        check_cards({name: str(model) for name, model in job.models.items()})
    with opened_verifiers(job, progress) as verifiers:
        answers = recall(job, progress) if request.output.rescore else _answered(job, progress)
        scored = judge_answers(job, verifiers, answers, progress)
    others = bridged_scores(job, progress) if request.output.lm_eval else []
    report = _report(job, answers, scored, others)
    measured, notices = measure_texts(job, progress) if job.texts else ((), [])
    report = replace(
        report,
        perplexity=measured,
        notices=(*report.notices, *notices),
        seconds=time.monotonic() - begun,
    )
    _keep(job, scored, report)
    return report


def _answered(job: EvaluationJob, progress: Progress) -> AnswersByModel:
    asked = [prompt_model(job, name, model) for name, model in job.models.items()]
    for one in asked if job.tasks else ():
        progress.note(remaining_work(job, one))
    return {one.name: answer(job, one, progress) for one in asked}


def _report(
    job: EvaluationJob,
    answers: AnswersByModel,
    scored: Sequence[ScoredTask],
    others: Sequence[TaskScores],
) -> EvaluationReport:
    settings, models = job.settings, list(answers)
    tasks = (*(_scores(task, models, settings) for task in scored), *others)
    given = {name: str(model) for name, model in job.models.items()}
    return EvaluationReport(
        protocol=settings.protocol,
        settings=settings.model_dump(mode="json"),
        models={name: given.get(name, name) for name in models},
        tasks=tasks,
        rows=compare_models(tasks, models, draws=settings.draws, seed=settings.seed),
        notices=(*failures(answers), *_notices(tasks, models)),
        inputs=_inputs(job.models),
    )


def _inputs(models: Mapping[str, ModelLike]) -> dict[str, dict[str, str]]:
    """Return which of these models are the base and the sources of which, by their reports."""
    by_place = {_place(str(model)): name for name, model in models.items()}
    found: dict[str, dict[str, str]] = {}
    for place, name in by_place.items():
        inputs = earlier_report(Path(place)).get("merge", {}).get("inputs", {})
        for one in inputs.values():
            other = by_place.get(_place(str(one.get("model"))))
            if other is not None and other != name:
                found.setdefault(name, {})[other] = "base" if one.get("base") else "source"
    return found


def _place(model: str) -> str:
    """Return what all references to one model have in common: the folder, or the hub id."""
    return os.path.realpath(model) if os.path.isdir(model) else model


def _scores(task: ScoredTask, models: Sequence[str], settings: EvaluationSettings) -> TaskScores:
    posed = task.posed
    own = posed.task.settings
    return TaskScores(
        name=posed.name,
        title=own.title,
        domain=own.domain,
        problems=posed.names,
        scores=task.scores(),
        single=posed.samples == 1,
        counts=tuple(task.counts(model) for model in models),
        source=own.data,
        expected=own.problems,
        most_tokens=generation_settings(settings, posed.task).max_new_tokens,
    )


def _notices(tasks: Sequence[TaskScores], models: Sequence[str]) -> Iterator[str]:
    for task in tasks:
        if task.expected is not None and len(task.problems) != task.expected:
            posed = counted(len(task.problems), "problem")
            yield f"{task.name}: {posed}; the whole set has {task.expected}"
        for model, counts in zip(models, task.counts, strict=False):
            if counts.cut:
                yield (
                    f"{model}, {task.name}: {counts.cut} of {counted(counts.asked, 'completion')} "
                    f"cut (most tokens: {task.most_tokens}), judged as generated"
                )
            for grade in ("undecided", "timeout"):
                if number := counts.grades.get(grade):
                    answers = counted(number, "answer")
                    yield f"{model}, {task.name}: {answers} {grade}, counted as wrong"


def _keep(job: EvaluationJob, scored: Sequence[ScoredTask], report: EvaluationReport) -> None:
    out = job.out
    for task in scored:
        for model in task.answers:
            folder = make_folder(out, "answers", file_name(task.posed.name))
            write_rows(folder / f"{file_name(model)}.jsonl", _answers(task, model))
    for text in report.perplexity:
        folder = make_folder(out, "losses", file_name(text.name))
        for model, losses in text.documents.items():
            write_rows(folder / f"{file_name(model)}.jsonl", losses.rows())
    document = report_document(evaluation=report.to_json())
    write_whole(out / RESULTS, report_bytes(document))
    if job.request.output.report is not None:
        write_scores_page(page_document(report, scored, document), job.request.output.report)
    if job.request.output.card:
        write_cards(report)


def _answers(task: ScoredTask, model: str) -> Iterator[dict[str, Any]]:
    for name, samples in zip(task.posed.names, task.answers[model], strict=True):
        for one in samples:
            yield {"problem": name, "prompt": one.text, **one.to_json()}
