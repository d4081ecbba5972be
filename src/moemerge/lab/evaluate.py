"""Run an evaluation from a request to its report and results folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from moemerge.checkpoint.model_card import report_bytes, report_document
from moemerge.config.models import ModelLike
from moemerge.errors import DataError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.losses import DocumentLosses, NextTokenLoss
from moemerge.forward.settings import StreamSettings, forward_dtype, logit_batch_tokens
from moemerge.forward.stream import ModelStream
from moemerge.lab.answers import (
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
from moemerge.lab.benchmarks import (
    EvaluationJob,
    EvaluationRequest,
    generation_settings,
    prepare,
)
from moemerge.lab.engines import public_url
from moemerge.lab.lm_eval_tasks import bridged_scores, load_lm_eval
from moemerge.lab.pages import write_scores_page
from moemerge.lab.score_pages import check_cards, page_document, write_cards
from moemerge.lab.scores import EvaluationReport, TaskScores, compare_models
from moemerge.lab.settings import EvaluationSettings
from moemerge.lab.text_losses import TextPerplexity, compare_losses
from moemerge.repairs.card import earlier_report
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.files import make_folder, write_whole
from moemerge.runtime.outputs import FileKind, check_output_file
from moemerge.runtime.progress import Progress, counted
from moemerge.runtime.ranks import SINGLE
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain, TextSettings, load_domains
from moemerge.text.rows import write_rows
from moemerge.text.tokens import load_tokenizer

RESULTS = "results.json"


def run_evaluation(request: EvaluationRequest, progress: Progress) -> EvaluationReport:
    """Let models answer, judge the answers, and compare. Run it again to resume a killed run."""
    begun = time.monotonic()
    job = prepare(request)
    others = load_lm_eval(request.output.lm_eval) if request.output.lm_eval else None
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
    with opened_verifiers(job) as verifiers:
        answers = recall(job, progress) if request.output.rescore else _answered(job, progress)
        scored = judge_answers(job, verifiers, answers, progress)
    bridged = bridged_scores(job, *others, progress) if others else []
    report = _report(job, answers, scored, bridged)
    measured, notices = _measure_texts(job, progress) if job.texts else ((), [])
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
        settings={
            **settings.model_dump(mode="json"),
            "url": [public_url(url) for url in settings.url],
        },
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


# --- perplexity -----------------------------------------------------------------------------------


def _measure_texts(
    job: EvaluationJob, progress: Progress
) -> tuple[tuple[TextPerplexity, ...], list[str]]:
    """Run every model over every text; return the results, and notices about the text."""
    found: dict[str, dict[str, DocumentLosses]] = {name: {} for name in job.texts}
    rows: dict[str, dict[str, Domain]] = {name: {} for name in job.texts}
    notices: list[str] = []
    for label, reference in job.models.items():
        model = open_model(label, reference)
        model.require_readable("dequantise it to bfloat16 first and use that folder")
        domains = _read_texts(job, model)
        losses = _losses(job, model, domains, progress)
        for domain in domains:
            notices += domain.notices
            own = losses.documents(domain)
            if own is None:
                raise DataError(
                    f"{domain.name}: no token has a next one, so there is no loss",
                    hint="give rows of more than one token",
                )
            found[domain.name][label], rows[domain.name][label] = own, domain
    results = []
    for place, (name, by_model) in enumerate(found.items()):
        alike, others = _by_tokens(rows[name])
        if others:
            notices.append(
                f"{name}: {', '.join(others)} has other tokens than {alike[0]}, so a loss a token "
                "cannot be compared"
            )
        rng = np.random.default_rng([job.settings.seed, place])
        results.append(compare_losses(name, by_model, alike, job.settings.draws, rng))
    return tuple(results), list(dict.fromkeys(notices))


def _read_texts(job: EvaluationJob, model: OpenModel) -> tuple[Domain, ...]:
    bounds = TextSettings.of(job.settings, answers=True)
    return load_domains(job.texts, load_tokenizer(model.checkpoint.tokenizer_folder), bounds)


def _losses(
    job: EvaluationJob, model: OpenModel, domains: Sequence[Domain], progress: Progress
) -> NextTokenLoss:
    device = resolve_device(job.settings.device)
    dtype = forward_dtype(job.settings.dtype, model, device)
    most = logit_batch_tokens(model, device, dtype)
    losses = NextTokenLoss(SINGLE)
    with ModelStream(
        model.checkpoint,
        make_batches(domains, batch_tokens=most),
        StreamSettings(device, dtype),
        output="logits",
        on_output=losses.add,
        progress=progress,
    ) as running:
        for _ in running:
            pass
    model.checkpoint.require_unchanged()
    return losses


def _by_tokens(domains: Mapping[str, Domain]) -> tuple[list[str], list[str]]:
    """Return the models whose tokens are the first model's, and the others."""
    first = next(iter(domains.values()))

    def same(domain: Domain) -> bool:
        pairs = zip(first.rows, domain.rows, strict=False)
        return len(first.rows) == len(domain.rows) and all(a.equal(b) for a, b in pairs)

    alike = [name for name, domain in domains.items() if same(domain)]
    return alike, [name for name in domains if name not in alike]
