"""Make a file of calibration text: answer prompts, judge the answers, and write rows."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from moemerge.errors import DataError
from moemerge.lab.data.job import (
    NO_CHECK,
    DataRequest,
    Selected,
    balanced,
    check_request,
    select_prompts,
    select_texts,
)
from moemerge.lab.engines import Finish, engine_maker
from moemerge.lab.generate import (
    Answer,
    CompletionJournal,
    Counts,
    Generated,
    PromptRow,
    complete,
    count_answers,
    judge,
    made_by,
    open_tokenizer,
    tokenized,
)
from moemerge.lab.judgement import Verifier
from moemerge.lab.verify import CachedVerifier, check_rows, make_verifier
from moemerge.runtime.journals import completions_path, judgements_path
from moemerge.runtime.progress import Progress, counted
from moemerge.text.rows import write_rows
from moemerge.text.templates import has_template
from moemerge.text.tokens import Tokenizer, contents_of


def answer_prompts(
    request: DataRequest,
    prompts: Sequence[PromptRow],
    tokenizer: Tokenizer,
    verifier: Verifier | None,
    progress: Progress,
) -> tuple[list[Answer], Generated]:
    """Return all answers, and statistics of the generation. Finished work is kept next to OUT."""
    settings = request.settings
    if verifier is not None:
        check_rows(verifier, [(row.where, row.fields) for row in prompts])
    _, tokens = tokenized(prompts, tokenizer, settings.prefill)
    make_engine = engine_maker(request.model, tokenizer, settings, progress)
    common = made_by(request.model, settings)
    path = completions_path(request.out)
    with CompletionJournal(path, common, restart=request.overwrite) as journal:
        generated = complete(tokens, settings, make_engine, journal, progress)
    answers = [
        Answer(prompt, completion, settings.prefill + completion.text)
        for prompt, completions in zip(prompts, generated.completions, strict=True)
        for completion in completions
    ]
    if verifier is not None:
        with CachedVerifier(verifier, judgements_path(request.out)) as cached:
            answers = judge(answers, cached, settings.workers, progress)
    return answers, generated


# --- rows as they are written ---------------------------------------------------------------------


def answered_row(request: DataRequest, answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a row of a prompt and its answer, which reads back as the tokens that the model wrote.

    Without a chat template the answer follows the prompt directly, and the end token that the model
    wrote follows the answer.
    """
    if has_template(tokenizer):
        return conversation_row(answer.prompt, answer.response)
    # After a stop text there is no end token: the model did not write one.
    ended = answer.completion.finish is Finish.STOP and not request.settings.stop
    end = str(tokenizer.eos_token) if ended and tokenizer.eos_token else ""
    return {"text": contents_of(answer.prompt.turns) + answer.response + end}


def plain_row(prompt: PromptRow, response: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a row with a prompt and, if there is one, the data set's solution."""
    if has_template(tokenizer):
        return conversation_row(prompt, response)
    text = contents_of(prompt.turns)
    return {"text": text} if response is None else {"prompt": text, "response": response}


def conversation_row(prompt: PromptRow, response: str | None) -> dict[str, Any]:
    if len(prompt.turns) == 1:
        row = {"prompt": prompt.turns[0]["content"]}
        return row if response is None else {**row, "response": response}
    answer = [] if response is None else [{"role": "assistant", "content": response}]
    return {"messages": [*prompt.turns, *answer]}


@dataclass(frozen=True)
class DataReport:
    """Counts of rows that `moemerge data` read, dropped, generated and kept."""

    output: str
    keep: str
    verify: str
    read: int  # rows of all files
    repeated: int  # prompts dropped as repetitions
    contaminated: Mapping[str, int]  # prompts dropped, by the benchmark that contains them
    prompts: int  # selected prompts
    answers: Counts
    by_group: Mapping[str, Counts]
    kept: int
    kept_by_group: Mapping[str, int]
    reused: int  # completions of an earlier run
    tokens: int  # generated in this run
    seconds: float
    generating_seconds: float
    notices: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        generating = values.pop("generating_seconds")
        rate = round(self.tokens / max(generating, 1e-9), 1)
        return {**values, "tokens_per_second": rate, "seconds": round(self.seconds, 3)}


Grouped = tuple[str, dict[str, Any]]  # a row and its group
NOTHING = Generated((), 0, 0, 0.0)


def run_data(request: DataRequest, progress: Progress) -> DataReport:
    """Write the file, complete or not at all. Run it again to resume a killed run."""
    begun = time.monotonic()
    check_request(request)
    if request.text:
        texts, selected = select_texts(request)
        rows: list[Grouped] = [(group, {"text": text}) for group, text in texts]
        return _finish(request, selected, rows, [], NOTHING, begun)
    settings = request.settings
    opened: AbstractContextManager[Verifier | None] = nullcontext()
    if settings.verify != NO_CHECK:
        opened = make_verifier(
            settings.verify,
            allow_code=settings.allow_code,
            workers=settings.workers,
        )
    with opened as verifier:
        prompts, selected = select_prompts(request)
        tokenizer = open_tokenizer(request.model)
        if not request.generates:
            rows = _unanswered(request, prompts, tokenizer)
            return _finish(request, selected, rows, [], NOTHING, begun)
        answers, generated = answer_prompts(request, prompts, tokenizer, verifier, progress)
    if settings.completions is not None:
        write_rows(settings.completions, map(_described, answers))
    rows = [
        (answer.prompt.group, answered_row(request, answer, tokenizer))
        for answer in _kept(request, answers)
    ]
    report = _finish(request, selected, rows, answers, generated, begun)
    for path in (completions_path(request.out), judgements_path(request.out)):
        path.unlink(missing_ok=True)
    return report


def _unanswered(
    request: DataRequest, prompts: Sequence[PromptRow], tokenizer: Tokenizer
) -> list[Grouped]:
    alone = request.settings.keep == "prompt"
    for prompt in prompts:
        if prompt.reference is None and not alone:
            raise DataError(
                f"{prompt.where}: no solution to keep in a row with {', '.join(prompt.fields)}",
                hint='name its column: `map={"reference": COLUMN}`',
            )
    return [
        (prompt.group, plain_row(prompt, None if alone else prompt.reference, tokenizer))
        for prompt in prompts
    ]


def _kept(request: DataRequest, answers: Sequence[Answer]) -> list[Answer]:
    """Return usable answers, without repetitions per prompt."""
    settings = request.settings
    kept: list[Answer] = []
    for _where, group in groupby(answers, key=lambda answer: answer.prompt.where):
        distinct: dict[str, Answer] = {}
        for answer in group:
            wanted = answer.usable or settings.keep == "all"
            if wanted and not answer.completion.has_failed:
                distinct.setdefault(answer.response.strip(), answer)
        kept += list(distinct.values())[: settings.per_prompt]
    return kept


def _described(answer: Answer) -> dict[str, Any]:
    prompt = answer.prompt
    return {"where": prompt.where, "prompt": prompt.user_text, **answer.to_json()}


def _finish(
    request: DataRequest,
    selected: Selected,
    rows: Sequence[Grouped],
    answers: Sequence[Answer],
    generated: Generated,
    begun: float,
) -> DataReport:
    settings = request.settings
    counts = count_answers(answers)
    if not rows:
        raise DataError(
            f"nothing to keep: {_describe(counts)}" if answers else "nothing to keep",
            hint='the answers are kept next to the output: `keep="all"` keeps them, and '
            "`completions=FILE` shows them"
            if answers
            else "the files hold no rows that are left",
        )
    kept = balanced(rows, lambda row: row[0], settings.rows, random.Random(settings.seed))
    write_rows(request.out, (row for _group, row in kept))
    groups = dict.fromkeys(answer.prompt.group for answer in answers)
    return DataReport(
        output=str(request.out),
        keep="text" if request.text else settings.keep,
        verify=settings.verify,
        read=selected.read,
        repeated=selected.repeated,
        contaminated=selected.contaminated,
        prompts=0 if request.text else len(selected.places),
        answers=counts,
        by_group={
            name: count_answers(a for a in answers if a.prompt.group == name) for name in groups
        },
        kept=len(kept),
        kept_by_group=dict(Counter(group for group, _row in kept)),
        reused=generated.reused,
        tokens=generated.tokens,
        seconds=time.monotonic() - begun,
        generating_seconds=generated.seconds,
    )


def _describe(counts: Counts) -> str:
    grades = ", ".join(f"{number} {grade}" for grade, number in counts.grades.items())
    return (
        f"of {counted(counts.asked, 'answer')} {counts.answered} ended, {counts.cut} cut and "
        f"{counts.failed} failed" + (f" ({grades})" if grades else "")
    )
