"""A model's tokenizer, and rows as its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moemerge.errors import DataError, TokenizerError
from moemerge.text.rows import Conversation, TextRow, UnreadKeys, parse_row

# A folder without any of these has no vocabulary. transformers would make an empty one of the
# model's usual kind and tokenize every text to nothing or to unknown tokens.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model*",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece*.model",
)
Tokenizer = PreTrainedTokenizerBase  # its name in rooms that do not know transformers
ROWS_AT_ONCE = 128  # handed to the tokenizer together, which has threads of its own


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies in a model folder."""
    hint = "copy the tokenizer files of one of the sources into the model folder"
    if not any(next(Path(folder).glob(pattern), None) for pattern in VOCABULARIES):
        raise TokenizerError(
            f"{folder}: no usable tokenizer (none of {', '.join(VOCABULARIES)})", hint=hint
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder))  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TokenizerError(
            f"{folder}: no usable tokenizer ({type(error).__name__}: {_first_line(error)})",
            hint=hint,
        ) from error


def tokenize(
    rows: Sequence[TextRow], tokenizer: PreTrainedTokenizerBase, unread: UnreadKeys
) -> Iterator[list[int]]:
    """Rows one by one, tokenized some at a time; a bad row is an error when its turn comes."""
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        ready: list[str | list[int]] = []
        error: DataError | None = None
        for row in rows[begin : begin + ROWS_AT_ONCE]:
            try:
                ready.append(_text_or_tokens(row, tokenizer, unread))
            except DataError as bad:
                error = bad
                break
        yield from _ids_of(ready, tokenizer)
        if error is not None:
            raise error


def _text_or_tokens(
    row: TextRow, tokenizer: PreTrainedTokenizerBase, unread: UnreadKeys
) -> str | list[int]:
    """Plain text that is still to be tokenized, or what a chat template has made."""
    parsed = parse_row(row, unread)
    if isinstance(parsed, str):
        return parsed
    if parsed.joinable and not getattr(tokenizer, "chat_template", None):
        return "\n".join(turn["content"] for turn in parsed.turns)
    return _chat(parsed, tokenizer, row.where)


def _chat(parsed: Conversation, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where}: a {parsed.key!r} row needs a chat template, and the tokenizer has none",
            hint="use rows with 'text' or 'prompt', or add chat_template.jinja to the model folder",
        )
    try:
        ids = tokenizer.apply_chat_template(
            list(parsed.turns), tokenize=True, add_generation_prompt=False, return_dict=False
        )
    except TemplateError as error:
        raise DataError(
            f"{where}: the tokenizer's chat template refuses this row ({_first_line(error)})"
        ) from error
    return _ids(ids)


def _ids_of(rows: Sequence[str | list[int]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    texts = [row for row in rows if isinstance(row, str)]
    encoded = iter(tokenizer(texts)["input_ids"] if texts else ())
    return [_ids(next(encoded)) if isinstance(row, str) else row for row in rows]


def _ids(ids: Any) -> list[int]:
    return [int(token) for token in ids]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
