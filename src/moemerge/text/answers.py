"""Rows for training: their tokens, read as in every job, and which of them are answers.

An answer is an assistant's turn and what the chat template writes after it, so that a model also
learns to stop. In plain text all tokens are trained on.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from moemerge.errors import DataError, TokenizerError, library_errors
from moemerge.runtime.progress import counted
from moemerge.text.domains import TextSettings
from moemerge.text.reading import Rows
from moemerge.text.rows import TextSource, UnreadKeys, source_names, wanted_columns
from moemerge.text.tokens import (
    JOINED,
    MARGIN,
    RowText,
    Span,
    answer_spans,
    beginnings,
    mask_by_prefixes,
    row_text,
)

LAST_TOKENS: Final = 3  # tokens at the end of an answer in which its end token is searched


@dataclass(frozen=True)
class AnsweredRow:
    """Tokens, and a mask of those trained on: packed, because there may be hundreds of millions."""

    tokens: array[int]
    learnt: bytes  # a 1 for each token that is trained on


@dataclass(frozen=True)
class Answers:
    """The rows with something to train on, in the order of their files."""

    rows: tuple[AnsweredRow, ...]
    read: int  # rows of all files
    notices: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def learnt(self) -> int:
        return sum(sum(row.learnt) for row in self.rows)


def load_answers(
    sources: Sequence[TextSource], tokenizer: PreTrainedTokenizerBase, settings: TextSettings
) -> Answers:
    """Return rows with answers; if `limit` applies, the seed selects the rows."""
    rows = Rows(sources, wanted_columns(settings.map))
    rng = random.Random(settings.seed * 0x1_0000_0000 + zlib.crc32(b"tune"))
    order, ordered = rows.drawn(None if settings.limit is None else rng)
    reader = _Reader(tokenizer, settings.max_length)
    taken: dict[int, AnsweredRow] = {}
    for at in order:
        if len(taken) == settings.limit:
            break
        row = reader.read(row_text(next(ordered), tokenizer, reader.unread, settings.map))
        if row is not None:
            taken[at] = row
    if not taken:
        raise DataError(
            f"{', '.join(source_names(sources))}: no answer to learn in {counted(len(rows), 'row')}"
            f"{reader.why_none()}",
            hint="a row needs an assistant's turn, a response, an output, or plain text",
        )
    kept = tuple(taken[at] for at in sorted(taken))
    return Answers(kept, len(rows), tuple(reader.notices(kept)))


class _Reader:
    """Converts rows to tokens and masks, and collects notices."""

    def __init__(self, tokenizer: Any, max_length: int | None) -> None:
        self.unread = UnreadKeys()
        self._tokenizer = tokenizer
        self._most = max_length
        self._unanswered = self._cut = self._lost = self._rewritten = 0
        self._joined = False

    def read(self, text: RowText) -> AnsweredRow | None:
        """Return None for a row without an answer, or whose answer begins after the cut."""
        spans = self._spans(text)
        self._joined |= text.joined
        if not spans:
            self._unanswered += 1
            return None
        tokens, learnt = self._tokens(text, spans)
        if text.turns and not text.templated:
            self._end(tokens, learnt)
        row = AnsweredRow(array("i", tokens[: self._most]), bytes(learnt[: self._most]))
        self._cut += len(row.tokens) < len(tokens)
        # The first token is never predicted.
        if not any(row.learnt[1:]):
            self._lost += 1
            return None
        return row

    def _spans(self, text: RowText) -> list[Span]:
        """Return the character ranges of answers."""
        if not text.turns:
            return [(0, len(text.text))] if text.text else []
        found = answer_spans(text, self._tokenizer)
        spans = [span for span in found if span is not None]
        if len(spans) < len(found):
            self._rewritten += 1
            if found[-1] is None:
                raise DataError(
                    f"{text.where}: the chat template does not begin this row as it begins the "
                    "prompt of its last answer, so where the answer begins is not known",
                    hint="give the row as plain text, or the model another chat_template.jinja",
                )
        return spans

    def _tokens(self, text: RowText, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """Return the tokens of a text, or of a beginning with enough tokens."""
        for part in beginnings(text.text, self._most):
            ids, learnt = self._encoded(part, spans, text)
            if self._most is not None and len(ids) >= self._most + MARGIN:
                break
        return ids, learnt

    def _encoded(
        self, part: str, spans: Sequence[Span], text: RowText
    ) -> tuple[list[int], list[bool]]:
        special = not text.templated
        with library_errors(TokenizerError, f"{text.where}: the tokenizer cannot take this text"):
            if not self._tokenizer.is_fast:
                ids = list(self._tokenizer(part, add_special_tokens=special)["input_ids"])
                shown = replace(text, text=part)
                return ids, mask_by_prefixes(ids, shown, spans, self._tokenizer)
            made = self._tokenizer(part, add_special_tokens=special, return_offsets_mapping=True)
            inner = made.sequence_ids(0)  # None for special tokens that the tokenizer adds
            ids = [int(token) for token in made["input_ids"]]
            places = made["offset_mapping"]
        learnt = [
            own is not None and any(start < b and a < end for start, end in spans)
            for own, (a, b) in zip(inner, places, strict=True)
        ]
        # An end token that the tokenizer adds belongs to the answer before it.
        last = next((n for n in reversed(range(len(ids))) if inner[n] is not None), -1)
        for n in range(last + 1, len(ids)):
            learnt[n] = last >= 0 and learnt[last]
        return ids, learnt

    def _end(self, tokens: list[int], learnt: list[bool]) -> None:
        """Return the end token, which ends an answer if there is no template."""
        end = self._tokenizer.eos_token_id
        if end is not None and tokens and tokens[-1] != end and learnt[-1]:
            tokens.append(int(end))
            learnt.append(True)

    def why_none(self) -> str:
        parts = []
        if self._unanswered:
            parts.append(f"{counted(self._unanswered, 'holds', 'hold')} no answer")
        if self._lost:
            parts.append(f"of {self._lost} it begins after `max_length`, {self._most} tokens")
        return f" ({'; '.join(parts)})" if parts else ""

    def notices(self, rows: Sequence[AnsweredRow]) -> Iterator[str]:
        yield from self.unread.notices()
        if self._joined:
            yield JOINED
        if self._unanswered:
            yield f"{counted(self._unanswered, 'row holds', 'rows hold')} no answer, left out"
        if self._lost:
            yield (
                f"{counted(self._lost, 'row')} left out: the answer begins after `max_length`, "
                f"{self._most} tokens"
            )
        if self._cut > self._lost:
            yield (
                f"{self._cut - self._lost} of {counted(len(rows), 'row')} longer than "
                f"`max_length`, {self._most} tokens: cut there"
            )
        if self._rewritten:
            yield (
                f"in {counted(self._rewritten, 'row')} the chat template renders earlier turns "
                "differently once later ones follow: those answers are not learnt"
            )
        ends = set(self._tokenizer.all_special_ids)
        if not any(ends.intersection(row.tokens[-LAST_TOKENS:]) for row in rows):
            yield (
                "no row ends with a special token of the tokenizer, so the model does not learn "
                "where to stop"
            )
