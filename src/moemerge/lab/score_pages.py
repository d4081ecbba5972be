"""The document behind an evaluation's HTML page, and its entry in model cards."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.locate import is_hub_id
from moemerge.checkpoint.model_card import CARD_NAME
from moemerge.errors import DataError
from moemerge.lab.answers import ScoredTask
from moemerge.lab.engines import Finish
from moemerge.lab.generate import Answer
from moemerge.lab.scores import EvaluationReport
from moemerge.runtime.checksums import update_checksum
from moemerge.runtime.files import open_plain, write_whole
from moemerge.runtime.progress import counted

EXPECTED: Final = ("answer", "canonical_solution", "code")  # the first that a row has is shown


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
        "headline": report.headline,
        "verdicts": report.other_verdicts,
        "drawn": "greedy" if greedy else drawn,
        "answers": {
            "models": list(report.models),
            "tasks": [_task(task, list(report.models)) for task in scored],
        },
    }


def _task(task: ScoredTask, models: Sequence[str]) -> dict[str, Any]:
    scores = task.scores()
    return {
        "name": task.posed.name,
        "title": task.posed.task.settings.title,
        "problems": [
            {
                "name": name,
                "prompt": row.user_text,
                "expected": str(next((row.fields[k] for k in EXPECTED if k in row.fields), "")),
                "scores": [float(value) for value in scores[:, place]],
                "texts": [_texts(task.answers[model][place]) for model in models],
            }
            for place, (name, row) in enumerate(
                zip(task.posed.names, task.posed.problems, strict=True)
            )
        ],
    }


def _texts(samples: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the first right and the first wrong sample."""
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


_FRONT: Final = re.compile(r"\A---\n(.*?)^---\n", re.S | re.M)
# A top-level key, and all lines below it that are indented, list items or empty.
_INDEX: Final = re.compile(r"^model-index:[^\n]*\n(?:(?:[ \t-][^\n]*)?\n)*", re.M)


# --- the model card -------------------------------------------------------------------------------


def model_index(report: EvaluationReport, model: str) -> str:
    """Return the YAML of one model's results. Strings are quoted as in JSON, which YAML accepts."""
    quoted = json.dumps
    text = f"model-index:\n- name: {quoted(model)}\n  results:\n"
    for (title, data_set), (metric, name, value) in _results(report, model):
        text += f"""\
  - task:
      type: text-generation
    dataset:
      name: {quoted(title)}
      type: {quoted(data_set)}
    metrics:
    - type: {quoted(metric)}
      name: {quoted(name)}
      value: {value:.4f}
"""
    return text


def _results(
    report: EvaluationReport, model: str
) -> Iterator[tuple[tuple[str, str], tuple[str, str, float]]]:
    """Yield title and data set, then metric, its description and value, of each task and text."""
    rows = {row.name: row for row in report.rows if row.kind == "task"}
    for task in report.tasks:
        score = rows[task.name].scores[model]
        error = "" if score.error is None else f", standard error {100 * score.error:.2f}"
        name = f"{task.metric} (protocol {report.protocol}{error})"
        source = re.split("[@:]", task.source or "")[0]
        data_set = source if is_hub_id(source) else task.name
        yield (task.title, data_set), (task.metric, name, 100 * score.mean)
    for text in report.perplexity:
        loss = text.scores[model]
        error = "" if loss.error is None else f" ± {loss.error:.4f}"
        name = f"perplexity (loss {loss.loss:.4f}{error} nats a token)"
        yield (text.name, text.name), ("perplexity", name, loss.perplexity)


def check_cards(models: dict[str, str]) -> None:
    """Refuse models without a folder, whose cards cannot be written, before any work is done."""
    if not models:
        raise DataError(
            "no model is given, so no card can be written",
            hint="name the model folders with `rescore`, too",
        )
    for model in models.values():
        if not os.path.isdir(os.path.expanduser(model)):
            raise DataError(
                f"{model} is not a folder, so its card cannot be written",
                hint="results.json in the output has the numbers",
            )
        _read_card(Path(os.path.expanduser(model)) / CARD_NAME)


def _read_card(path: Path) -> str | None:
    """Return a card's text; None if there is none. It is never read through a link."""
    if not os.path.lexists(path):
        return None
    try:
        if os.path.islink(path):
            raise OSError("it is a link")
        with open(open_plain(path), encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be given scores ({error})",
            hint="expected a README.md in UTF-8; rename it, or run without `card`",
        ) from error


def write_cards(report: EvaluationReport) -> list[Path]:
    """Write the scores into each model's card, in place of its earlier ones."""
    written = []
    for name, model in report.models.items():
        path = Path(os.path.expanduser(model)) / CARD_NAME
        text = _read_card(path)
        text = f"# {name}\n" if text is None else text
        write_whole(path, with_index(text, model_index(report, name)).encode())
        update_checksum(path)
        written.append(path)
    return written


def with_index(card: str, index: str) -> str:
    """Return a card with this `model-index` in its front matter, in place of an earlier one."""
    front = _FRONT.match(card)
    if front is None:
        return f"---\n{index}---\n{card}"
    kept = _INDEX.sub("", front[1])
    return f"---\n{kept}{index}---\n{card[front.end() :]}"
