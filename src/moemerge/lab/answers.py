"""Let models answer problems, and keep the answers in a results folder.

completions/MODEL-HASH.jsonl  completions of one model with one set of sampling settings
completions/MODEL-HASH.json   the problems they answer, and the prompts that the model saw
judgements/CHECK.jsonl        judgements, so that no text is judged twice
answers/TASK/MODEL.jsonl      answers with their judgements, for people
results.json                  the report
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from moemerge.config.models import ModelLike
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import DataError
from moemerge.lab.benchmarks import EvaluationJob, PosedTask, generation_settings
from moemerge.lab.engines import Completion, engine_maker
from moemerge.lab.generate import (
    Answer,
    CompletionJournal,
    Counts,
    complete,
    count_answers,
    judge,
    made_by,
    open_tokenizer,
    prompt_key,
    sampling_settings,
    tokenized,
)
from moemerge.lab.judgement import Verifier
from moemerge.lab.significance import Array
from moemerge.lab.verify import CachedVerifier, check_rows, make_verifier
from moemerge.runtime.files import make_folder, read_object, write_whole
from moemerge.runtime.formatting import display_names
from moemerge.runtime.progress import Progress, counted
from moemerge.text.templates import has_template
from moemerge.text.tokens import Tokenizer

_UNSAFE: Final = re.compile(r"[^\w.+-]+")
INDEX_KIND: Final = "moemerge evaluation"


def file_name(text: str) -> str:
    """Return a file name for any text."""
    return _UNSAFE.sub("_", text).strip("._") or "_"


@dataclass(frozen=True)
class RecordedPrompt:
    """One prompt as a model saw it; `key` identifies its completions."""

    key: str
    prompt: str


@dataclass(frozen=True)
class CompletionIndex:
    """The problems that the completions of one file answer."""

    path: Path
    model: str
    made_by: Mapping[str, Any]
    tasks: dict[str, dict[str, RecordedPrompt]]  # task -> problem -> prompt

    @property
    def completions(self) -> Path:
        return self.path.with_suffix(".jsonl")

    def written(self) -> float:
        """Return when a completion was last added; 0 if the file is missing."""
        return self.completions.stat().st_mtime if os.path.exists(self.completions) else 0.0

    def journal(self) -> CompletionJournal:
        return CompletionJournal(self.completions, self.made_by)

    @classmethod
    def of(cls, out: Path, model: ModelLike, settings: GenerationSettings) -> CompletionIndex:
        """Open or create the index of this model and these sampling settings."""
        common = made_by(model, settings)
        content = json.dumps(common, sort_keys=True).encode()
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        folder = out / "completions"
        # The hash identifies the model, wherever it is stored now.
        known = sorted(folder.glob(f"*-{digest}.json"))
        (name,) = display_names([str(model)])
        path = known[0] if known else folder / f"{file_name(name)}-{digest}.json"
        tasks = cls.read(path).tasks if os.path.exists(path) else {}
        return cls(path, str(model), common, tasks)

    @classmethod
    def read(cls, path: Path) -> CompletionIndex:
        hint = "delete it: the same command without `rescore` writes it anew"
        try:
            content = read_object(path, hint, DataError)
            if content["kind"] != INDEX_KIND:
                raise ValueError(f"its kind is {content['kind']!r}")
            tasks = {
                task: {name: RecordedPrompt(**asked) for name, asked in problems.items()}
                for task, problems in content["tasks"].items()
            }
            return cls(path, content["model"], content["made_by"], tasks)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged ({type(error).__name__}: {error})",
                hint=hint,
            ) from error

    def write(self) -> None:
        content = {"kind": INDEX_KIND, **asdict(self)}
        del content["path"]
        make_folder(self.path.parents[1], self.path.parent.name)
        write_whole(self.path, json.dumps(content).encode())


Answers = tuple[tuple[Answer, ...], ...]  # by problem and sample
AnswersByModel = dict[str, dict[str, Answers]]  # model -> task


def _answers(
    posed: PosedTask, prompts: Iterable[str], completions: Iterable[Sequence[Completion]]
) -> Answers:
    """Return the answers to one task from its prompts, as the model saw them, and completions."""
    prefill = posed.task.settings.prefill
    return tuple(
        tuple(Answer(row, one, prefill + one.text, text) for one in samples)
        for row, text, samples in zip(posed.problems, prompts, completions, strict=True)
    )


@dataclass(frozen=True)
class PromptedModel:
    """A model with its tokenizer, and every prompt as it will see it."""

    name: str
    model: ModelLike
    tokenizer: Tokenizer
    prompts: Mapping[str, list[str]]  # task -> prompts
    tokens: Mapping[str, list[list[int]]]


def prompt_model(job: EvaluationJob, name: str, model: ModelLike) -> PromptedModel:
    """Return every prompt of a model, before it is loaded."""
    tokenizer = open_tokenizer(model)
    if job.settings.plain:
        tokenizer.chat_template = None
    prompts, tokens = {}, {}
    for posed in job.tasks:
        task = posed.task.settings
        if task.needs_chat_template and not has_template(tokenizer) and not job.settings.plain:
            raise DataError(
                f"{model}: task {posed.name} needs a chat template, and the tokenizer has none",
                hint="add chat_template.jinja to the model folder; `plain=True` uses plain text",
            )
        texts, ids = tokenized(posed.problems, tokenizer, task.prefill)
        prompts[posed.name], tokens[posed.name] = texts, ids
    return PromptedModel(name, model, tokenizer, prompts, tokens)


def remaining_work(job: EvaluationJob, asked: PromptedModel) -> str:
    """Describe the work that is left for a model. Writes nothing."""
    made = reused = length = most = 0
    for settings, tasks in _groups(job):
        index = CompletionIndex.of(job.out, asked.model, settings)
        known: set[tuple[str, int]] = set()
        if os.path.exists(index.completions):
            with index.journal() as journal:
                known = journal.finished()
        for line in (line for task in tasks for line in asked.tokens[task.name]):
            key = prompt_key(line)
            missing = sum((key, sample) not in known for sample in range(settings.samples))
            made += missing
            reused += settings.samples - missing
            length += len(line) if missing else 0
            most += missing * settings.max_new_tokens
    if not made:
        return f"{asked.name}: all {reused} completions exist already"
    there = f" ({reused} exist already)" if reused else ""
    return (
        f"{asked.name}: {counted(made, 'completion')} to make{there}, prompts of "
        f"{counted(length, 'token')}, at most {counted(most, 'token')} to generate"
    )


def _groups(job: EvaluationJob) -> list[tuple[GenerationSettings, list[PosedTask]]]:
    """Group tasks by their sampling settings: a model is loaded once per group."""
    groups: dict[GenerationSettings, list[PosedTask]] = {}
    for posed in job.tasks:
        groups.setdefault(generation_settings(job.settings, posed.task), []).append(posed)
    return list(groups.items())


def answer(job: EvaluationJob, asked: PromptedModel, progress: Progress) -> dict[str, Answers]:
    """Return all answers of one model by task. Each is written to disk once it is generated."""
    answered = {}
    for settings, tasks in _groups(job):
        index = CompletionIndex.of(job.out, asked.model, settings)
        for task in tasks:
            prompts = zip(asked.tokens[task.name], asked.prompts[task.name], strict=True)
            lines = [RecordedPrompt(prompt_key(line), text) for line, text in prompts]
            index.tasks.setdefault(task.name, {}).update(zip(task.names, lines, strict=True))
        index.write()
        make_engine = engine_maker(asked.model, asked.tokenizer, settings, progress)
        together = [line for task in tasks for line in asked.tokens[task.name]]
        with index.journal() as journal:
            # `remaining_work` has announced what exists.
            done = complete(together, settings, make_engine, journal, progress, announce=False)
            made = iter(done.completions)
        for task in tasks:
            completions = [next(made) for _problem in task.problems]
            answered[task.name] = _answers(task, asked.prompts[task.name], completions)
    return answered


def recall(job: EvaluationJob, progress: Progress) -> AnswersByModel:
    """Read answers from the folder, of the named models or of all."""
    groups = _groups(job)
    drawn = [sampling_settings(settings) for settings, _tasks in groups]
    indexes: dict[str, dict[int, CompletionIndex]] = {}
    for path in sorted((job.out / "completions").glob("*.json")):
        index = CompletionIndex.read(path)
        way = {name: value for name, value in index.made_by.items() if name != "model"}
        if way not in drawn:
            continue
        place = drawn.index(way)
        before = indexes.setdefault(index.model, {}).get(place)
        if before is not None:  # the folder holds two models of the same name
            progress.note(
                f"{index.model}: the folder has answers of two versions; the newer ones are used"
            )
            index = max(before, index, key=CompletionIndex.written)
        indexes[index.model][place] = index
    wanted = [str(model) for model in job.models.values()] or list(indexes)
    if not wanted:
        raise DataError(
            f"{job.out} holds no answers with these sampling settings",
            hint="give the settings they were sampled with (`samples`, `temperature`, ...), "
            "or run without `rescore`",
        )
    names = dict(zip(wanted, display_names(wanted), strict=True))
    return {names[label]: _recalled(job, label, indexes.get(label, {})) for label in wanted}


def _recalled(
    job: EvaluationJob, label: str, indexes: Mapping[int, CompletionIndex]
) -> dict[str, Answers]:
    answered = {}
    for place, (settings, tasks) in enumerate(_groups(job)):
        index = indexes.get(place)
        if index is None or not os.path.exists(index.completions):
            raise _missing(job, label, tasks[0], len(tasks[0].problems) * settings.samples)
        with index.journal() as journal:
            for task in tasks:
                prompts = index.tasks.get(task.name, {})
                asked = [prompts.get(name) for name in task.names]
                known = [
                    [a and journal.get(a.key, n, sample) for sample in range(settings.samples)]
                    for n, a in enumerate(asked)
                ]
                found = [[one for one in samples if one] for samples in known]
                lacking = sum(settings.samples - len(samples) for samples in found)
                if lacking:
                    raise _missing(job, label, task, lacking)
                answered[task.name] = _answers(task, (a.prompt for a in asked if a), found)
    return answered


def _missing(job: EvaluationJob, label: str, task: PosedTask, count: int) -> DataError:
    return DataError(
        f"{label}: {counted(count, 'answer')} to {task.name} missing in {job.out}",
        hint="the same command without `rescore` makes them",
    )


def failures(answers: AnswersByModel) -> list[str]:
    """Return one line per task with failed completions."""
    lines = []
    for model, tasks in answers.items():
        for task, answered in tasks.items():
            made = [one.completion for samples in answered for one in samples]
            failed = [one.detail for one in made if one.has_failed]
            if failed:
                lines.append(
                    f"{model}, {task}: {counted(len(failed), 'completion')} could not be made, "
                    f"counted as wrong ({failed[0]}); the same command tries them again"
                )
    return lines


@dataclass(frozen=True)
class ScoredTask:
    """A task with the judged answers of all models: model -> problem -> sample."""

    posed: PosedTask
    answers: Mapping[str, Answers]

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
def opened_verifiers(job: EvaluationJob) -> Iterator[dict[str, Verifier]]:
    """Open the verifiers of all tasks by name, and refuse rows that they cannot judge."""
    made: dict[str, Verifier] = {}
    with ExitStack() as stack:
        for posed in job.tasks:
            if posed.verify not in made:
                verifier = make_verifier(
                    posed.verify,
                    allow_code=job.settings.allow_code,
                    workers=job.settings.workers,
                )
                made[posed.verify] = stack.enter_context(verifier)
            check_rows(made[posed.verify], [(row.where, row.fields) for row in posed.problems])
        yield made


def judge_answers(
    job: EvaluationJob,
    verifiers: Mapping[str, Verifier],
    answers: AnswersByModel,
    progress: Progress,
) -> list[ScoredTask]:
    """Judge all answers. Texts that were judged before are looked up."""
    with ExitStack() as stack:
        cached = {}
        for name, verifier in verifiers.items():
            path = make_folder(job.out, "judgements") / f"{file_name(name)}.jsonl"
            cached[name] = stack.enter_context(CachedVerifier(verifier, path))
        return [_scored(job, posed, cached[posed.verify], answers, progress) for posed in job.tasks]


def _scored(
    job: EvaluationJob,
    posed: PosedTask,
    verifier: Verifier,
    answers: AnswersByModel,
    progress: Progress,
) -> ScoredTask:
    answered = {
        model: [samples[: posed.samples] for samples in tasks[posed.name]]
        for model, tasks in answers.items()
    }
    made = [one for problems in answered.values() for samples in problems for one in samples]
    judged = iter(judge(made, verifier, job.settings.workers, progress))
    return ScoredTask(
        posed,
        {
            model: tuple(tuple(next(judged) for _ in samples) for samples in problems)
            for model, problems in answered.items()
        },
    )
