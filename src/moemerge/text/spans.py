"""Find the answers of a row: assistant turns, with what the chat template writes after them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from moemerge.errors import TokenizerError, library_errors
from moemerge.text.rows import Turn
from moemerge.text.templates import render_turns
from moemerge.text.tokens import RowText, contents_of

ASSISTANT: Final = "assistant"
Span = tuple[int, int]  # characters of a text, end excluded


def answer_spans(text: RowText, tokenizer: PreTrainedTokenizerBase) -> list[Span | None]:
    """Return the character range of every answer; None if the template rewrote the text before it.

    Some templates render an earlier turn differently once a later one follows.
    """
    at = [n for n, turn in enumerate(text.turns) if turn.get("role") == ASSISTANT]
    return [_span(text, n, tokenizer) for n in at]


def _span(text: RowText, turn: int, tokenizer: PreTrainedTokenizerBase) -> Span | None:
    before, after = text.turns[:turn], text.turns[: turn + 1]
    if not text.templated:
        return len(contents_of(before)) + 1 if before else 0, len(contents_of(after))

    def rendered(turns: Sequence[Turn], *, add_generation_prompt: bool) -> str:
        return render_turns(
            turns, tokenizer, text.where, add_generation_prompt=add_generation_prompt
        )

    ends = turn + 1 == len(text.turns)
    end = text.text if ends else rendered(after, add_generation_prompt=False)
    for add_generation_prompt in (True, False):
        start = rendered(before, add_generation_prompt=add_generation_prompt) if before else ""
        if end.startswith(start) and text.text.startswith(end):
            return len(start), len(end)
    return None


def mask_by_prefixes(
    ids: Sequence[int],
    text: RowText,
    spans: Iterable[Span],
    tokenizer: PreTrainedTokenizerBase,
) -> list[bool]:
    """Return which tokens of a text (or of its beginning) belong to its answers.

    A prefix has the tokens that it shares with the full text, so token offsets are not needed.
    """
    mask = [False] * len(ids)
    for start, end in spans:
        first = _shared(ids, text.text[:start], text, tokenizer)
        stop = len(ids)
        if end < len(text.text):
            stop = _shared(ids, text.text[:end], text, tokenizer)
        mask[first:stop] = [True] * (stop - first)
    return mask


def _shared(
    ids: Sequence[int], beginning: str, text: RowText, tokenizer: PreTrainedTokenizerBase
) -> int:
    with library_errors(TokenizerError, f"{text.where}: the tokenizer cannot take this text"):
        own = tokenizer(beginning, add_special_tokens=not text.templated)["input_ids"]
    pairs = enumerate(zip(own, ids, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(own), len(ids)))
