"""Read rows of any data set as prompts: which column is used for what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Final

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.locate import locate_data
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import PromptSettings
from moemerge.errors import DataError
from moemerge.registry import did_you_mean
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
