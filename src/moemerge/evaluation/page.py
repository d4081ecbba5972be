"""What the page of an evaluation shows: the report, and texts of every problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moemerge.evaluation.report import EvaluationReport
from moemerge.evaluation.scoring import JudgedAnswer, ScoredTask
from moemerge.generation.engine import Finish
from moemerge.runtime.words import counted


def page_document(
    report: EvaluationReport, scored: Sequence[ScoredTask], header: Mapping[str, Any]
) -> dict[str, Any]:
    settings = report.settings
    greedy = settings["samples"] == 1 and not settings["temperature"]
    samples = counted(settings["samples"], "sample")
    drawn = f"{samples} a problem at temperature {settings['temperature']:g}"
    return {
        **report.to_json(),
        "version": header["moemerge"],
        "created": header["created"],
        "headline": headline(report),
        "drawn": "greedy" if greedy else drawn,
        "answers": {
            "models": list(report.models),
            "tasks": [_task(task, list(report.models)) for task in scored],
        },
    }


def headline(report: EvaluationReport) -> str:
    """The most general comparison in a sentence; of one model its score."""
    last = next((row for row in report.rows if row.kind == "overall"), report.rows[-1])
    if not last.pairs:
        model, score = next(iter(last.scores.items()))
        return f"{model} solves {100 * score.mean:.1f}% of {last.title}"
    if len(last.pairs) > 1:
        best = max(last.scores, key=lambda model: last.scores[model].mean)
        return f"{best} is best: {100 * last.scores[best].mean:.1f}% of {last.title}"
    pair = last.pairs[0]
    by = f"{100 * abs(pair.difference):.1f} points of {last.title}"
    better, worse = (pair.second, pair.first)[:: 1 if pair.difference >= 0 else -1]
    if pair.significant:
        return f"{better} is better than {worse}, by {by}"
    return f"{pair.second} and {pair.first} differ by {by}, which may be chance"


def _task(task: ScoredTask, models: Sequence[str]) -> dict[str, Any]:
    scores = task.scores()
    return {
        "name": task.posed.name,
        "title": task.posed.task.settings.title,
        "problems": [
            {
                "name": name,
                "prompt": row.asked,
                "expected": _expected(row.fields),
                "scores": [float(value) for value in scores[:, place]],
                "texts": [_texts(task.answers[model][place]) for model in models],
            }
            for place, (name, row) in enumerate(
                zip(task.posed.names, task.posed.problems, strict=True)
            )
        ],
    }


def _expected(fields: Mapping[str, Any]) -> str:
    answer = fields.get("answer", fields.get("canonical_solution", fields.get("code", "")))
    return str(answer)


def _texts(samples: Sequence[JudgedAnswer]) -> list[dict[str, Any]]:
    """The first right and the first wrong sample."""
    first = {one.right: one for one in reversed(samples)}
    return [
        {
            "text": one.response,
            "grade": "not made" if one.judged is None else one.judged.grade.value,
            "detail": one.completion.detail if one.judged is None else one.judged.detail,
            "cut": one.completion.finish is Finish.LENGTH,
        }
        for one in first.values()
    ]
