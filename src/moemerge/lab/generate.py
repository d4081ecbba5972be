"""Prompts from rows of any data set, and their completions, read from disk or generated."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any, Final, Self

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import locate_data
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import GenerationSettings, PromptSettings
from moemerge.errors import DataError, MoeMergeError, ResourceError
from moemerge.lab.engines import Completion, CompletionRequest, Engine, Finish, load_engine
from moemerge.lab.judgement import Judgement, Verifier
from moemerge.lab.verify import check_all
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import is_out_of_memory
from moemerge.runtime.journals import LineStore, OtherRunError
from moemerge.runtime.progress import Progress, counted
from moemerge.text.rows import TextRow, TextSource, Turn, file_of, row_fields, said, turns_of
from moemerge.text.tokens import Tokenizer, load_tokenizer, prompt_text, prompt_tokens

# Default columns: the first of these that a row has.
USUAL: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt": ("prompt", "question", "problem", "instruction"),
    "answer": ("answer", "expected_answer", "answerKey", "target"),
    "reference": (
        "reference", "response", "completion", "solution", "generated_solution",
        "canonical_solution", "code", "output", "answer",
    ),
    "text": ("text", "content"),
}  # fmt: skip
CONVERSATIONS: Final = ("messages", "conversations")
_PLACE: Final = re.compile(r"\{(\w+)(?:\[(\d+)\])?\}")


@dataclass(frozen=True)
class PromptRow:
    """One prompt: its turns, and the row's fields by their usual names."""

    where: str
    turns: tuple[Turn, ...]  # up to the answer
    fields: Mapping[str, Any]  # under `prompt`, `answer` and so on, whatever the columns' names
    group: str  # its group, if prompts are balanced
    reference: str | None = None

    @property
    def user_text(self) -> str:
        """All text of the user's turns, for comparing prompts."""
        return "\n".join(str(t["content"]) for t in self.turns if t["role"] != "system")


def located(sources: Sequence[TextSource]) -> list[TextSource]:
    """Return files and rows, with downloaded files in place of hub data sets."""
    result: list[TextSource] = []
    for source in sources:
        result += locate_data(source) if isinstance(source, str) else [source]
    return result


def open_tokenizer(model: ModelLike) -> Tokenizer:
    with Checkpoint.open(model) as checkpoint:
        return load_tokenizer(checkpoint.tokenizer_folder)


def tokenized(
    prompts: Sequence[PromptRow], tokenizer: Tokenizer, prefill: str
) -> tuple[list[str], list[list[int]]]:
    """Return each prompt as the model sees it, as text and as tokens. An empty one is an error."""
    texts = [prompt_text(row.turns, tokenizer, prefill, row.where) for row in prompts]
    tokens = prompt_tokens(texts, tokenizer)
    for row, ids in zip(prompts, tokens, strict=True):
        if not ids:
            raise DataError(f"{row.where}: the prompt is empty, expected a question")
    return texts, tokens


def read_prompts(
    rows: Iterable[TextRow], settings: PromptSettings, group_by: str | None = None
) -> list[PromptRow]:
    """Return all rows as prompts; a row without one is an error."""
    return [read_prompt(row, settings, group_by) for row in rows]


def read_prompt(row: TextRow, settings: PromptSettings, group_by: str | None = None) -> PromptRow:
    fields = row_fields(row)
    for name, column in settings.map.items():
        if column not in fields:
            raise DataError(
                f"{row.where}: no column {column!r} for {name}{did_you_mean(column, fields)}",
                hint=f'columns: {", ".join(fields)}; `map={{"{name}": COLUMN}}`',
            )
    named: dict[str, Any] = dict(fields)
    for name, column in settings.map.items():
        named[name] = fields[column]
    for usual in ("prompt", "answer"):
        present = [column for column in USUAL[usual] if column in named]
        if present and usual not in named:
            named[usual] = named[present[0]]
    if "instruction" in named and isinstance(named.get("input"), str) and named["input"]:
        named["prompt"] = f"{named['prompt']}\n\n{named['input']}"
    turns, answer = _turns(named, row.where)
    turns = _dressed(turns, named, settings)
    solutions = [named[c] for c in USUAL["reference"] if isinstance(named.get(c), str)]
    reference = answer or (solutions[0] if solutions else None)
    group = str(named.get(group_by)) if group_by else file_of(row.where)
    return PromptRow(row.where, turns, named, group, reference)


def _turns(fields: Mapping[str, Any], where: str) -> tuple[tuple[Turn, ...], str | None]:
    """Return the turns up to the last one of the user, and the answer that follows it."""
    if "prompt" in fields:
        return said(fields, "prompt", "user", where), None
    for key in CONVERSATIONS:
        if key not in fields:
            continue
        turns = turns_of(fields, key, where)
        last = max((at for at, t in enumerate(turns) if t["role"] == "user"), default=None)
        if last is None:
            raise DataError(f"{where}: no turn of the user in {key!r}, expected at least one")
        after = [str(t["content"]) for t in turns[last + 1 :] if t["role"] == "assistant"]
        return turns[: last + 1], after[0] if after else None
    raise DataError(
        f"{where}: no prompt in a row with {', '.join(fields) or 'no columns'}",
        hint='name its column: `map={"prompt": COLUMN}`',
    )


def _dressed(
    turns: tuple[Turn, ...], fields: Mapping[str, Any], settings: PromptSettings
) -> tuple[Turn, ...]:
    """Put the last turn into the template, and add the system message."""
    *before, last = turns
    values = {**fields, "prompt": last["content"]}
    if "choices" in values:
        values["choices"] = lettered(values["choices"])

    def filled(match: re.Match[str]) -> str:
        value = values.get(match[1])
        if match[2] is not None and isinstance(value, list) and int(match[2]) < len(value):
            return str(value[int(match[2])])
        # Other braces belong to the template, as in \boxed{}.
        return match[0] if value is None or match[2] is not None else str(value)

    said_last = {**last, "content": _PLACE.sub(filled, settings.template)}
    system: list[Turn] = [{"role": "system", "content": settings.system}] if settings.system else []
    return (*system, *before, said_last)


def lettered(choices: Any) -> str:
    """Format choices line by line, each with its letter: a list of texts, or {"label", "text"}
    lists.
    """
    if isinstance(choices, Mapping) and {"label", "text"} <= choices.keys():
        pairs = zip(choices["label"], choices["text"], strict=False)
    elif isinstance(choices, list):
        pairs = zip(ascii_uppercase, choices, strict=False)
    else:
        return str(choices)
    return "\n".join(f"({letter}) {text}" for letter, text in pairs)


# --- completions ----------------------------------------------------------------------------------

COMPLETIONS_KIND: Final = "moemerge completions"
COMPLETIONS_EDITION: Final = 2


class CompletionJournal:
    """Completions of one model with one set of sampling settings (`made_by`)."""

    def __init__(self, path: Path, made_by: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self._made_by = dict(made_by)
        self._known: dict[tuple[str, int], Completion] = {}  # by `prompt_key` and sample
        head = {"kind": COMPLETIONS_KIND, "edition": COMPLETIONS_EDITION, "made_by": self._made_by}
        try:
            self._file = LineStore(path, head, restart=restart)
        except OtherRunError as error:
            raise self._another_run(error.stored) from error
        try:
            for line in self._file.lines:
                values = {**line, "prompt": -1, "finish": Finish(line["finish"])}
                self._known[line["prompt"], line["sample"]] = Completion(**values)
        except (ValueError, KeyError, TypeError) as error:
            self._file.close()
            raise DataError(
                f"{path} is damaged ({type(error).__name__}: {error})",
                hint="remove it, or start anew with `overwrite=True`",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def get(self, key: str, prompt: int, sample: int) -> Completion | None:
        """Return the completion of a prompt with this key, at its index in the caller's list."""
        known = self._known.get((key, sample))
        return known and replace(known, prompt=prompt)

    def finished(self) -> set[tuple[str, int]]:
        """Return the keys and samples of completions that did not fail."""
        return {key for key, completion in self._known.items() if not completion.has_failed}

    def add(self, tokens: Sequence[int], completion: Completion) -> None:
        key = prompt_key(tokens)
        self._known[key, completion.sample] = completion
        self._file.add({**asdict(completion), "prompt": key})

    def _another_run(self, stored: Mapping[str, Any]) -> DataError:
        before = stored.get("made_by", {})
        before = before if isinstance(before, dict) else {}
        now = json.loads(json.dumps(self._made_by))
        differing = [
            f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
            for name in {**before, **now}
            if now.get(name) != before.get(name)
        ]
        return DataError(
            f"{self.path} holds completions of another, unfinished run: "
            + ("; ".join(differing) or "written by another version"),
            hint="run that one again to finish it, or start anew with `overwrite=True`",
        )


def prompt_key(tokens: Sequence[int]) -> str:
    """Return a prompt's key in the file: a hash of its tokens."""
    return hashlib.blake2b(struct.pack(f"<{len(tokens)}q", *tokens), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Generated:
    """All completions, by prompt and sample, and statistics of this run."""

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
    *,
    announce: bool = True,
) -> Generated:
    """Return `settings.samples` completions of each prompt. The engine is created only if needed.

    The next run tries a failed completion again. `announce` prints how many exist already.
    """
    finished: dict[tuple[int, int], Completion] = {}
    missing: list[CompletionRequest] = []
    for place, tokens in enumerate(prompts):
        key = prompt_key(tokens)
        for sample in range(settings.samples):
            known = journal.get(key, place, sample)
            if known is not None and not known.has_failed:
                finished[place, sample] = known
            else:
                missing.append(CompletionRequest(place, sample, tuple(tokens)))
    reused, tokens_made, begun = len(finished), 0, time.monotonic()
    if reused and announce:
        progress.note(f"{reused} of {counted(reused + len(missing), 'completion')} exist already")
    if missing:
        engine = load_engine(make_engine)
        begun = time.monotonic()
        progress.start("generating", len(missing), unit="completions")
        try:
            for completion in engine.generate(missing):
                journal.add(prompts[completion.prompt], completion)
                finished[completion.prompt, completion.sample] = completion
                tokens_made += completion.tokens
                rate = tokens_made / max(time.monotonic() - begun, 1e-9)
                progress.status(f"{rate:.0f} tokens/s")
                progress.advance(1)
        except MoeMergeError:
            raise
        except Exception as error:  # libraries raise many types when a device or a model fails
            why, hint = f"{type(error).__name__}: {error}", ""
            if is_out_of_memory(error):
                why, hint = "out of memory", "lower `batch_size`, or use fewer processes; "
            raise ResourceError(
                f"the engine {engine.name} stopped after {len(finished) - reused} of "
                f"{len(missing)} completions ({why})",
                hint=f"{hint}they are kept: the same command continues from there",
            ) from error
        finally:
            progress.finish()
            engine.close()
    completions = tuple(
        tuple(finished[place, sample] for sample in range(settings.samples))
        for place in range(len(prompts))
    )
    return Generated(completions, reused, tokens_made, time.monotonic() - begun)


# Settings that a completion depends on, besides its prompt and sample.
_DECISIVE = ("temperature", "top_p", "top_k", "max_new_tokens", "stop", "seed", "engine", "dtype")


def made_by(model: ModelLike, settings: GenerationSettings) -> dict[str, Any]:
    """Return what all completions of one file have in common."""
    with Checkpoint.open(model) as checkpoint:
        fingerprint = checkpoint.fingerprint()
    return {"model": fingerprint, **sampling_settings(settings)}


def sampling_settings(settings: GenerationSettings) -> dict[str, Any]:
    """Return `made_by` without the model, as JSON reads it back."""
    values = {name: getattr(settings, name) for name in _DECISIVE}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One answer to one prompt; `judged` is None if it failed or was not judged."""

    prompt: PromptRow
    completion: Completion
    response: str  # including the prefill
    text: str = ""  # the prompt as the model saw it
    judged: Judgement | None = None

    @property
    def right(self) -> bool:
        return self.judged is not None and self.judged.right

    @property
    def usable(self) -> bool:
        """Whether it is right and ended by itself."""
        return self.right and self.completion.finish is Finish.STOP

    def to_json(self) -> dict[str, Any]:
        """Return the answer without its prompt."""
        judged = self.judged
        return {
            "sample": self.completion.sample,
            "response": self.response,
            "tokens": self.completion.tokens,
            "finish": self.completion.finish.value,
            "grade": None if judged is None else judged.grade.value,
            "detail": self.completion.detail if judged is None else judged.detail,
        }


def judge(
    answers: Sequence[Answer], verifier: Verifier, workers: int | None, progress: Progress
) -> list[Answer]:
    """Return the answers with their judgements, in the same order."""
    made = [answer for answer in answers if not answer.completion.has_failed]
    items = [(answer.prompt.fields, answer.response) for answer in made]
    judged = iter(check_all(verifier, items, workers=workers, progress=progress))
    return [
        answer if answer.completion.has_failed else replace(answer, judged=next(judged))
        for answer in answers
    ]


@dataclass(frozen=True)
class Counts:
    """Number of answers by outcome."""

    asked: int = 0  # requested completions
    answered: int = 0  # ended by the model
    cut: int = 0  # cut at the most tokens, or at the end of the context
    failed: int = 0  # failed
    grades: Mapping[str, int] = field(default_factory=dict)  # grades of those that were judged

    @property
    def right(self) -> int:
        return self.grades.get("right", 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def count_answers(answers: Iterable[Answer]) -> Counts:
    answers = list(answers)
    finishes = Counter(answer.completion.finish for answer in answers)
    grades = Counter(a.judged.grade.value for a in answers if a.judged is not None)
    return Counts(
        asked=len(answers),
        answered=finishes[Finish.STOP],
        cut=finishes[Finish.LENGTH],
        failed=finishes[Finish.FAILED],
        grades=dict(grades.most_common()),
    )
