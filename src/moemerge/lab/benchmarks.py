"""Tasks and requests of an evaluation, and all checks before a model is loaded."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from moemerge.config.faults import parse_settings
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import DataError, UsageError
from moemerge.lab.generate import PromptRow, located, read_prompts
from moemerge.lab.settings import (
    PERPLEXITY,
    EvaluationOutputSettings,
    EvaluationSettings,
    TaskSettings,
    load_task,
)
from moemerge.registry import did_you_mean
from moemerge.runtime.formatting import display_names
from moemerge.runtime.outputs import check_name
from moemerge.text.rows import TextSource, check_text, read_rows

TASK_SUFFIXES: Final = (".yml", ".yaml")
_FOLDER: Final = Path(__file__).parent / "tasks"


@dataclass(frozen=True)
class BenchmarkTask:
    """A task, under the name by which it was requested."""

    name: str
    settings: TaskSettings
    file: Path

    @property
    def data(self) -> str | None:
        """The path of its problems. A relative path starts at the task's file."""
        source = self.settings.data
        if source is None:
            return None
        beside = self.file.parent / os.path.expanduser(source)
        return str(beside) if os.path.isfile(beside) else source


def task_names() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.yml"))


def find_task(name: str) -> BenchmarkTask:
    """Return a task of the package by name, or a task file of the user."""
    if name.lower().endswith(TASK_SUFFIXES):
        path = Path(os.path.expanduser(name))
        return BenchmarkTask(path.stem, load_task(path), path)
    path = _FOLDER / f"{name}.yml"
    if name not in task_names():
        raise UsageError(
            f"unknown task {name!r}{did_you_mean(name, [*task_names(), PERPLEXITY])}",
            hint=f"known: {', '.join([*task_names(), PERPLEXITY])}; or your own file, TASK.yml",
        )
    return BenchmarkTask(name, load_task(path), path)


# Columns that may name problems. The first with unique values is used.
NAMING: Final = ("task_id", "unique_id", "id", "key")


@dataclass(frozen=True)
class EvaluationRequest:
    """The models, the tasks, and the folder that keeps the answers."""

    models: Sequence[ModelLike]
    tasks: Sequence[str]
    settings: EvaluationSettings
    output: EvaluationOutputSettings
    data: Mapping[str, Sequence[TextSource]] = field(default_factory=dict)


@dataclass(frozen=True)
class PosedTask:
    """A task and the problems of it that are used."""

    task: BenchmarkTask
    problems: tuple[PromptRow, ...]
    names: tuple[str, ...]  # names of the problems
    verify: str  # under the protocol of this run
    samples: int  # samples that count under the protocol

    @property
    def name(self) -> str:
        return self.task.name


@dataclass(frozen=True)
class EvaluationJob:
    """A checked request, with its problems read."""

    request: EvaluationRequest
    tasks: tuple[PosedTask, ...]
    models: Mapping[str, ModelLike]  # by their names in tables
    texts: Mapping[str, Sequence[TextSource]] = field(default_factory=dict)  # of `perplexity`

    @property
    def settings(self) -> EvaluationSettings:
        return self.request.settings

    @property
    def out(self) -> Path:
        return self.request.output.out


def prepare(request: EvaluationRequest) -> EvaluationJob:
    """Read tasks and problems, and refuse whatever is wrong with them."""
    _check(request)
    asked = [name for name in dict.fromkeys(request.tasks) if name != PERPLEXITY]
    tasks = [find_task(name) for name in asked]
    texts = _texts(request, [task.name for task in tasks])
    _check_data_names(request, tasks, texts)
    posed = tuple(_posed(task, request) for task in tasks)
    labels = [str(model) for model in request.models]
    models = dict(zip(display_names(labels), request.models, strict=True))
    return EvaluationJob(request, posed, models, texts)


def _texts(request: EvaluationRequest, tasks: Sequence[str]) -> dict[str, tuple[TextSource, ...]]:
    """Return the texts of the task `perplexity`: data under names that are not those of tasks."""
    if PERPLEXITY not in request.tasks:
        return {}
    if request.output.rescore:
        raise UsageError(
            "perplexity has no answers that could be rescored",
            hint="run without `rescore`, or without the task perplexity",
        )
    texts = {n: tuple(located(files)) for n, files in request.data.items() if n not in tasks}
    if not texts:
        raise UsageError(
            "the task perplexity needs text", hint='name it: `data={"general": "general.jsonl"}`'
        )
    check_text(texts, columns=request.settings.map)
    return texts


def generation_settings(settings: EvaluationSettings, task: BenchmarkTask) -> GenerationSettings:
    """Return the sampling settings of one task."""
    shared = GenerationSettings.model_fields.keys() & EvaluationSettings.model_fields.keys()
    values = {name: getattr(settings, name) for name in shared}
    values["max_new_tokens"] = settings.max_new_tokens or task.settings.max_new_tokens
    return parse_settings(
        GenerationSettings, {**values, "stop": task.settings.stop}, f"task {task.name}"
    )


def _check(request: EvaluationRequest) -> None:
    if not request.tasks and not request.output.lm_eval:
        raise UsageError("no task is given", hint='`tasks="gsm8k"`, for instance')
    if request.output.lm_eval and request.output.rescore:
        raise UsageError(
            "tasks of lm-eval cannot be rescored: it scores answers as they are generated",
            hint="run without `rescore`; known answers are reused",
        )
    if not request.models and not request.output.rescore:
        raise UsageError("no model is given", hint="name the models to compare")
    labels = [str(model) for model in request.models]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise UsageError(f"{', '.join(twice)}: given twice", hint="name each model once")
    if len(labels) > 1 and request.settings.engine == "server" and not request.output.rescore:
        raise UsageError(
            f"{len(labels)} models, but a server runs one",
            hint="evaluate them one by one into the same `out`; `rescore=True` then compares all",
        )
    check_name(request.output.out)
    if os.path.exists(request.output.out) and not os.path.isdir(request.output.out):
        raise UsageError(f"{request.output.out} is a file, expected a folder to keep answers in")


def _check_data_names(
    request: EvaluationRequest, tasks: Sequence[BenchmarkTask], texts: Collection[str]
) -> None:
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"two task files are called {', '.join(twice)}", hint="rename one")
    for name in request.data:
        if name not in names and name not in texts:
            raise UsageError(
                f"data for {name!r}, which is none of the tasks{did_you_mean(name, names)}",
                hint=f"tasks: {', '.join(names)}",
            )


def _posed(task: BenchmarkTask, request: EvaluationRequest) -> PosedTask:
    settings = request.settings
    rows = read_prompts(read_rows(_sources(task, request)), task.settings)
    names = _names(rows)
    kept = list(range(len(rows)))
    if settings.limit is not None and settings.limit < len(rows):
        kept = sorted(random.Random(settings.seed).sample(kept, settings.limit))
    published = task.settings.paper if settings.protocol == "paper" else None
    verify = (published and published.verify) or task.settings.verify
    samples = (published and published.samples) or settings.samples
    return PosedTask(
        task,
        tuple(rows[place] for place in kept),
        tuple(names[place] for place in kept),
        verify,
        min(samples, settings.samples),
    )


def _sources(task: BenchmarkTask, request: EvaluationRequest) -> list[TextSource]:
    given = request.data.get(task.name)
    if given:
        return located(given)
    if task.data is None:
        raise DataError(
            f"task {task.name}: its file names no data", hint=f'`data={{"{task.name}": FILE}}`'
        )
    try:
        return located([task.data])
    except DataError as error:
        raise DataError(
            f"task {task.name}: {error.message}",
            hint=f'`data={{"{task.name}": FILE}}` reads its problems from a file',
        ) from error


def _names(rows: Sequence[PromptRow]) -> list[str]:
    """Return each problem's name, or its number."""
    for column in NAMING:
        names = [str(row.fields.get(column, "")) for row in rows]
        if all(names) and len(set(names)) == len(names):
            return names
    return [str(number) for number in range(1, len(rows) + 1)]
