"""Rows of any data set as prompts: which column holds what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moemerge.config.data import DataSettings
from moemerge.errors import DataError
from moemerge.registry import did_you_mean
from moemerge.text.rows import TextRow, Turn, row_fields, said, turns_of

# Where a set does not say otherwise: the first of these columns that a row has.
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
_PLACE: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class PromptRow:
    """One prompt: what is said to the model, and the row's fields by their usual names."""

    where: str
    turns: tuple[Turn, ...]  # up to the answer
    fields: Mapping[str, Any]  # with `prompt`, `answer` and so on, whatever their columns are
    group: str  # gets its share where prompts are balanced
    reference: str | None = None

    @property
    def asked(self) -> str:
        """All that the user says, for comparing prompts."""
        return "\n".join(str(t["content"]) for t in self.turns if t["role"] != "system")


def read_prompts(rows: Sequence[TextRow], settings: DataSettings) -> list[PromptRow]:
    """All rows as prompts; a row without one is an error."""
    return [_prompt(row, settings) for row in rows]


def _prompt(row: TextRow, settings: DataSettings) -> PromptRow:
    fields = row_fields(row)
    for name, column in settings.map.items():
        if column not in fields:
            raise DataError(
                f"{row.where}: no column {column!r} for {name}{did_you_mean(column, fields)}",
                hint=f"columns: {', '.join(fields)}; --map {name}=COLUMN",
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
    group = str(named.get(settings.balance)) if settings.balance else _file(row.where)
    return PromptRow(row.where, turns, named, group, answer or _reference(named))


def _turns(fields: Mapping[str, Any], where: str) -> tuple[tuple[Turn, ...], str | None]:
    """The turns up to the last of the user's, and the answer that follows it."""
    if "prompt" in fields:
        return said(fields, "prompt", "user", where), None
    for key in CONVERSATIONS:
        if key not in fields:
            continue
        turns = turns_of(fields, key, where)
        last = max((at for at, t in enumerate(turns) if t["role"] == "user"), default=None)
        if last is None:
            raise DataError(f"{where}: nobody asks in {key!r}, expected a turn of the user's")
        after = [str(t["content"]) for t in turns[last + 1 :] if t["role"] == "assistant"]
        return turns[: last + 1], after[0] if after else None
    raise DataError(
        f"{where}: no prompt in a row with {', '.join(fields) or 'no columns'}",
        hint="name its column: --map prompt=COLUMN",
    )


def _dressed(
    turns: tuple[Turn, ...], fields: Mapping[str, Any], settings: DataSettings
) -> tuple[Turn, ...]:
    """The last turn put into the template, and the system message before all."""
    *before, last = turns
    values = {**fields, "prompt": last["content"]}

    def filled(match: re.Match[str]) -> str:
        # Other braces are the template's own: \boxed{} and the like.
        return str(values[match[1]]) if match[1] in values else match[0]

    said_last = {**last, "content": _PLACE.sub(filled, settings.template)}
    system: list[Turn] = [{"role": "system", "content": settings.system}] if settings.system else []
    return (*system, *before, said_last)


def _reference(fields: Mapping[str, Any]) -> str | None:
    columns: Iterable[str] = (c for c in USUAL["reference"] if isinstance(fields.get(c), str))
    column = next(iter(columns), None)
    return None if column is None else str(fields[column])


def read_texts(rows: Sequence[TextRow], settings: DataSettings) -> list[tuple[str, str]]:
    """(group, text) of rows of plain text."""
    texts = []
    for row in rows:
        fields = row_fields(row)
        column = settings.map.get("text") or next((c for c in USUAL["text"] if c in fields), "text")
        if not isinstance(fields.get(column), str):
            raise DataError(
                f"{row.where}: no text in column {column!r}{did_you_mean(column, fields)}",
                hint=f"columns: {', '.join(fields)}; --map text=COLUMN",
            )
        group = str(fields.get(settings.balance)) if settings.balance else _file(row.where)
        texts.append((group, fields[column]))
    return texts


def _file(where: str) -> str:
    return where.rpartition(", row ")[0] or "rows in memory"
