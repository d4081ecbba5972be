"""A model's tokenizer, and rows as its tokens."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moemerge.errors import DataError, TokenizerError, library_errors
from moemerge.runtime.files import read_utf8
from moemerge.text.rows import TextRow, Turn, UnreadKeys, parse_row
from moemerge.text.templates import has_template, render

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
# Handed to the tokenizer together, which has threads of its own and keeps some 300 bytes of each
# character while it works.
ROWS_AT_ONCE: Final = 128
CHARACTERS_AT_ONCE: Final = 10**6
CHARACTERS_PER_TOKEN: Final = 16
# More tokens than are of use: where a text is cut, its last tokens are others than in the whole.
MARGIN: Final = 16


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies in a model folder."""
    hint = "copy the tokenizer files of one of the sources into the model folder"
    if not any(next(Path(folder).glob(pattern), None) for pattern in VOCABULARIES):
        raise TokenizerError(
            f"{folder}: no usable tokenizer (none of {', '.join(VOCABULARIES)})", hint=hint
        )
    _check_keys(Path(folder), hint)
    with library_errors(TokenizerError, f"{folder}: no usable tokenizer", hint=hint):
        return AutoTokenizer.from_pretrained(str(folder))  # type: ignore[no-any-return,no-untyped-call,unused-ignore]


def _check_keys(folder: Path, hint: str) -> None:
    """The tokenizers library prints keys of tokens that it does not know as they are, escape
    sequences for the terminal and all."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        path = folder / name
        if not path.exists():
            continue
        text = read_utf8(path, hint, TokenizerError)
        # Of a large file, the tokens that are listed one by one: a vocabulary's keys may be odd.
        begin = re.search(r'"added_tokens"\s*:\s*' if name == "tokenizer.json" else "", text)
        if begin is None:
            continue
        try:
            values = [json.JSONDecoder().raw_decode(text, begin.end())[0]]
        except (ValueError, RecursionError):  # which the library will tell of
            continue
        while values:
            value = values.pop()
            if isinstance(value, dict):
                odd = [key for key in value if not key.isprintable()]
                if odd:
                    raise TokenizerError(f"{path}: the key {odd[0]!r:.80} is no text", hint=hint)
                value = list(value.values())
            values += value if isinstance(value, list) else ()


def tokenize(
    rows: Iterable[TextRow],
    tokenizer: PreTrainedTokenizerBase,
    unread: UnreadKeys,
    most: Callable[[], int | None],
) -> Iterator[list[int]]:
    """Rows one by one, tokenized some at a time; a bad row is an error when its turn comes.

    `most` says how many tokens of a row are of use at that time: of a longer row, at least one more
    is given, so that it can be seen to be longer.
    """
    left = iter(rows)
    more = True
    while more:
        texts: list[RowText] = []
        error: DataError | None = None
        size = 0
        while len(texts) < ROWS_AT_ONCE and size < CHARACTERS_AT_ONCE and error is None:
            try:
                row = next(left, None)
                if row is None:
                    more = False
                    break
                texts.append(row_text(row, tokenizer, unread))
                size += len(texts[-1].text)
            except DataError as bad:
                error = bad
        yield from _ids_of(texts, tokenizer, most())
        if error is not None:
            raise error


@dataclass(frozen=True)
class RowText:
    """A row's text, and whether a chat template has written its special tokens."""

    text: str
    templated: bool
    where: str
    turns: tuple[Turn, ...] = ()  # that it was made of, where it is a conversation


def row_text(row: TextRow, tokenizer: PreTrainedTokenizerBase, unread: UnreadKeys) -> RowText:
    parsed = parse_row(row, unread)
    if isinstance(parsed, str):
        return RowText(parsed, False, row.where)
    if has_template(tokenizer):
        whole = render(parsed.turns, tokenizer, row.where, go_on=False)
        return RowText(whole, True, row.where, parsed.turns)
    if not parsed.joinable:
        raise DataError(
            f"{row.where}: a {parsed.key!r} row needs a chat template, and the tokenizer has none",
            hint="use rows with 'text' or 'prompt', or add chat_template.jinja to the model folder",
        )
    return RowText(joined(parsed.turns), False, row.where, parsed.turns)


def joined(turns: Sequence[Turn]) -> str:
    """What was said, line by line: a conversation without a chat template."""
    return "\n".join(str(turn["content"]) for turn in turns)


def _ids_of(
    texts: Sequence[RowText], tokenizer: PreTrainedTokenizerBase, most: int | None
) -> Iterator[list[int]]:
    """Tokens of each text; of a long one, of a beginning that has enough of them."""
    # Rarely has a token more characters; where many do, more of the text is taken.
    characters = None if most is None else CHARACTERS_PER_TOKEN * (most + MARGIN)
    for templated, group in itertools.groupby(texts, key=lambda text: text.templated):
        wanted = list(group)
        ids = _encoded(
            [text.text[:characters] for text in wanted], tokenizer, templated, wanted[0].where
        )
        for text, row in zip(wanted, ids, strict=True):
            taken = characters
            while most is not None and taken is not None and taken < len(text.text):
                if len(row) >= most + MARGIN:
                    break
                taken *= 4
                (row,) = _encoded([text.text[:taken]], tokenizer, templated, text.where)
            yield row


def _encoded(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, templated: bool, where: str
) -> list[list[int]]:
    with library_errors(TokenizerError, f"{where}: the tokenizer cannot take this text"):
        ids = tokenizer(texts, add_special_tokens=not templated)["input_ids"]
        return [[int(token) for token in row] for row in ids]


# --- prompts --------------------------------------------------------------------------------------


def prompt_text(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, prefill: str, where: str
) -> str:
    """Turns through the chat template, ready for the assistant, and the beginning of its answer.

    Without a template: what was said, line by line, and nothing after it.
    """
    if not has_template(tokenizer):
        return "\n".join(str(turn["content"]) for turn in turns) + prefill
    return render(turns, tokenizer, where, go_on=True) + prefill


def prompt_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of prompts; a template has written its special tokens itself."""
    if not texts:
        return []
    rows = tokenizer(list(texts), add_special_tokens=not has_template(tokenizer))["input_ids"]
    end = tokenizer.eos_token_id
    # Some tokenizers end every text by themselves, and this one is to go on.
    return [list(ids[:-1]) if len(ids) > 1 and ids[-1] == end else list(ids) for ids in rows]
