"""Complete many prompts: read known completions from disk, and generate the rest with an engine."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from transformers import PreTrainedTokenizerBase

from moemerge.checkpoint import Checkpoint
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import DataError, MoeMergeError, ResourceError, UsageError
from moemerge.lab.generation.engine import Completion, CompletionRequest, Engine, Finish
from moemerge.lab.generation.prompts import PromptRow
from moemerge.lab.generation.server import ServerEngine, check_urls
from moemerge.lab.generation.transformers_engine import TransformersEngine
from moemerge.lab.generation.vllm_engine import VllmEngine, check_installed
from moemerge.lab.verification.judgement import Judgement, Verifier
from moemerge.lab.verification.verifiers import check_all
from moemerge.runtime.devices import is_out_of_memory
from moemerge.runtime.journals import LineStore, OtherRunError
from moemerge.runtime.progress import Progress, counted

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
            for completion in engine.generate(missing, reused + len(missing)):
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


def load_engine(make_engine: Callable[[], Engine]) -> Engine:
    """Return the engine; a model that does not fit into memory is our error."""
    try:
        return make_engine()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ResourceError(
            "the model does not fit into the free memory of its device",
            hint='use `device="cpu"`, or fewer processes on the device',
        ) from error


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


# --- engines --------------------------------------------------------------------------------------


def engine_maker(
    model: ModelLike,
    tokenizer: PreTrainedTokenizerBase,
    settings: GenerationSettings,
    progress: Progress,
) -> Callable[[], Engine]:
    """Check the settings, and return a function that loads or connects to the model."""
    if settings.engine == "server":
        check_urls(settings)
        return lambda: ServerEngine(tokenizer, settings, progress)
    if settings.url:
        raise UsageError("`url` is for a server", hint='use `engine="server"`')
    if settings.engine == "vllm":
        check_installed()
        return lambda: VllmEngine(model, tokenizer, settings)
    return lambda: TransformersEngine(model, tokenizer, settings, progress)


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
