"""Answer prompts with a model, judge the answers, and format the rows that are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moemerge.data.job import DataRequest
from moemerge.generation.journal import CompletionJournal
from moemerge.generation.prompts import PromptRow, tokenized
from moemerge.generation.run import Answer, Generated, complete, engine_maker, judge, made_by
from moemerge.runtime.journals import completions_path, judgements_path
from moemerge.runtime.progress import Progress
from moemerge.text.templates import has_template
from moemerge.text.tokens import Tokenizer
from moemerge.verification.code_checks import CodeVerifier
from moemerge.verification.judgement import Verifier
from moemerge.verification.verifiers import CachedVerifier, check_rows


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
    if isinstance(verifier, CodeVerifier):
        for line in verifier.protections.sentences():
            progress.note(line)
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


def delete_unfinished(out: Path) -> None:
    """Delete the completions and judgements next to OUT, once OUT exists."""
    for path in (completions_path(out), judgements_path(out)):
        path.unlink(missing_ok=True)


# --- rows as they are written ---------------------------------------------------------------------


def answered_row(
    prompt: PromptRow, response: str, tokenizer: Tokenizer, *, ended: bool
) -> dict[str, Any]:
    """Return a row of a prompt and its answer, which reads back as the tokens that the model wrote.

    Without a chat template the answer follows the prompt directly, and the end token that the model
    wrote follows the answer.
    """
    if has_template(tokenizer):
        return _conversation(prompt, response)
    end = str(tokenizer.eos_token) if ended and tokenizer.eos_token else ""
    return {"text": _joined(prompt) + response + end}


def reference_row(prompt: PromptRow, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a row of a prompt and the data set's own solution."""
    assert prompt.reference is not None
    if has_template(tokenizer):
        return _conversation(prompt, prompt.reference)
    return {"prompt": _joined(prompt), "response": prompt.reference}


def prompt_row(prompt: PromptRow, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a row of a prompt alone."""
    if not has_template(tokenizer):
        return {"text": _joined(prompt)}
    if len(prompt.turns) == 1:
        return {"prompt": prompt.turns[0]["content"]}
    return {"messages": list(prompt.turns)}


def _conversation(prompt: PromptRow, response: str) -> dict[str, Any]:
    if len(prompt.turns) == 1:
        return {"prompt": prompt.turns[0]["content"], "response": response}
    return {"messages": [*prompt.turns, {"role": "assistant", "content": response}]}


def _joined(prompt: PromptRow) -> str:
    return "\n".join(str(turn["content"]) for turn in prompt.turns)
