"""Load a model's tokenizer, convert rows to tokens, and find the answers in them."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moemerge.errors import DataError, TokenizerError, library_errors
from moemerge.runtime.files import VOCABULARIES, read_utf8
from moemerge.text.rows import Columns, TextRow, Turn, UnreadKeys, parse_row
from moemerge.text.templates import has_template, render_turns

Tokenizer = PreTrainedTokenizerBase  # its name in packages that do not import transformers
# Rows per call of the tokenizer, which has its own threads and uses some 300 bytes per character.
ROWS_AT_ONCE: Final = 128
CHARACTERS_AT_ONCE: Final = 10**6
CHARACTERS_PER_TOKEN: Final = 16
# Extra tokens: the last tokens of a cut text differ from those of the whole text.
MARGIN: Final = 16
# Largest growth of a text by a tokenizer, which may come from anywhere: a few nested replacements
# turn one character into more than fits into memory.
MOST_GROWTH: Final = 100


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder."""
    hint = "copy the tokenizer files of one of the sources into the model folder"
    unusable = f"{folder}: no usable tokenizer"
    # Without a vocabulary, transformers would create an empty tokenizer of the model's type, which
    # maps every text to nothing or to unknown tokens.
    usual = ("tokenizer.json", "tokenizer.model*", *VOCABULARIES[1:])
    if not any(next(Path(folder).glob(pattern), None) for pattern in usual):
        raise TokenizerError(f"{unusable} (none of {', '.join(usual)})", hint=hint)
    _check_keys(Path(folder), hint)
    with library_errors(TokenizerError, unusable, hint=hint):
        tokenizer = AutoTokenizer.from_pretrained(str(folder))  # type: ignore[no-untyped-call,unused-ignore]
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise TokenizerError(
            f"{unusable}: model_max_length of tokenizer_config.json is {longest!r:.80}, "
            "expected a number",
            hint=hint,
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: written in Python
    for part in ("normalizer", "post_processor", "decoder"):
        step = getattr(backend, part, None)
        if step is not None and _growth(json.loads(step.__getstate__())) > MOST_GROWTH:
            raise TokenizerError(
                f"{unusable}: its {part} may make a text more than {MOST_GROWTH} times as long",
                hint=hint,
            )
    return tokenizer  # type: ignore[no-any-return,unused-ignore]


def _growth(step: Mapping[str, Any]) -> int:
    """Return how many times as long a step of a tokenizer may make a text, at most."""
    steps = [one for key in ("normalizers", "processors", "decoders") for one in step.get(key, ())]
    kind = step["type"]
    if kind == "Replace":
        # An expression may match nothing, between any two characters.
        found = len(step["pattern"].get("String", ""))
        return max(1, -(-len(step["content"]) // found) if found else 1 + len(step["content"]))
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        return 32  # one is usual; twice, it squares
    if kind == "TemplateProcessing":
        ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        copies = sum("Sequence" in piece for piece in step["single"])
        added = sum(ids[p["SpecialToken"]["id"]] for p in step["single"] if "SpecialToken" in p)
        return max(copies, added, 1)
    return math.prod(map(_growth, steps))


def _check_keys(folder: Path, hint: str) -> None:
    """Refuse unprintable keys: the tokenizers library prints unknown ones verbatim, including
    escape sequences for the terminal.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        path = folder / name
        if not os.path.exists(path):
            continue
        text = read_utf8(path, hint, TokenizerError)
        # In a large file, only the tokens that are listed one by one: a vocabulary may contain odd
        # keys.
        begin = re.search(r'"added_tokens"\s*:\s*' if name == "tokenizer.json" else "", text)
        if begin is None:
            continue
        try:
            values = [json.JSONDecoder().raw_decode(text, begin.end())[0]]
        except (ValueError, RecursionError):  # reported by the library
            continue
        while values:
            value = values.pop()
            if isinstance(value, dict):
                odd = [key for key in value if not key.isprintable()]
                if odd:
                    raise TokenizerError(f"{path}: the key {odd[0]!r:.80} is not text", hint=hint)
                value = list(value.values())
            values += value if isinstance(value, list) else ()


def tokenize(
    rows: Iterable[TextRow],
    tokenizer: PreTrainedTokenizerBase,
    unread: UnreadKeys,
    most: Callable[[], int | None],
    columns: Columns | None = None,
) -> Iterator[tuple[RowText, list[int]]]:
    """Yield text and tokens row by row, tokenised in groups. A bad row raises an error when it is
    reached.

    `most` returns the number of tokens still needed. A longer row has at least one more, so that it
    is recognised as longer.
    """
    group: list[RowText] = []
    size = 0
    error: DataError | None = None
    try:
        for row in rows:
            group.append(row_text(row, tokenizer, unread, columns))
            size += len(group[-1].text)
            if len(group) == ROWS_AT_ONCE or size >= CHARACTERS_AT_ONCE:
                yield from zip(group, _ids_of(group, tokenizer, most()), strict=True)
                group, size = [], 0
    except DataError as bad:
        error = bad
    yield from zip(group, _ids_of(group, tokenizer, most()), strict=True)
    if error is not None:
        raise error


@dataclass(frozen=True)
class RowText:
    """A row's text, and whether a chat template has written its special tokens."""

    text: str
    templated: bool
    row: TextRow  # as read
    turns: tuple[Turn, ...] = ()  # its turns, if it is a conversation

    @property
    def where(self) -> str:
        return self.row.where

    @property
    def joined(self) -> bool:
        """Whether it is a prompt and a response without a chat template."""
        return not self.templated and len(self.turns) > 1


def row_text(
    row: TextRow,
    tokenizer: PreTrainedTokenizerBase,
    unread: UnreadKeys,
    columns: Columns | None = None,
) -> RowText:
    """Render a row; `columns` as in `parse_row`."""
    parsed = parse_row(row, unread, columns)
    if isinstance(parsed, str):
        return RowText(parsed, False, row)
    if has_template(tokenizer):
        whole = render_turns(parsed.turns, tokenizer, row.where, add_generation_prompt=False)
        return RowText(whole, True, row, parsed.turns)
    if not parsed.joinable:
        raise DataError(
            f"{row.where}: {parsed.key!r} is a list of messages, which needs a chat template, and "
            "the tokenizer has none",
            hint="use rows with 'text', or with strings as 'prompt' and 'response'; or add "
            "chat_template.jinja to the model folder",
        )
    return RowText(contents_of(parsed.turns), False, row, parsed.turns)


# A notice about rows for which `RowText.joined` is true.
JOINED: Final = (
    "the tokenizer has no chat template, so prompt and response are joined by a newline: if the "
    'models were trained on another form, losses are too high; give {"text": ...} rows in that form'
)


def contents_of(turns: Sequence[Turn]) -> str:
    """Return the contents of turns line by line: a conversation without a chat template."""
    return "\n".join(str(turn["content"]) for turn in turns)


def _ids_of(
    texts: Sequence[RowText], tokenizer: PreTrainedTokenizerBase, most: int | None
) -> Iterator[list[int]]:
    """Return the tokens of each text; for a long one, of a beginning with enough tokens."""
    for templated, group in itertools.groupby(texts, key=lambda text: text.templated):
        wanted = list(group)
        parts = [beginnings(text.text, most) for text in wanted]
        ids = _encoded([next(part) for part in parts], tokenizer, templated, wanted[0].where)
        for text, row, longer in zip(wanted, ids, parts, strict=True):
            for part in longer:
                if most is not None and len(row) >= most + MARGIN:
                    break
                (row,) = _encoded([part], tokenizer, templated, text.where)
            yield row


def beginnings(text: str, most: int | None) -> Iterator[str]:
    """Yield longer and longer beginnings of a text, until one has `most` tokens and a margin.

    Few tokens have more characters than the first one allows. The last one is the whole text.
    """
    size = len(text) if most is None else CHARACTERS_PER_TOKEN * (most + MARGIN)
    while size < len(text):
        yield text[:size]
        size *= 4
    yield text


def _encoded(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, templated: bool, where: str
) -> list[list[int]]:
    with library_errors(TokenizerError, f"{where}: the tokenizer cannot take this text"):
        ids = tokenizer(texts, add_special_tokens=not templated)["input_ids"]
        return [[int(token) for token in row] for row in ids]


# --- answers: assistant turns, with what the chat template writes after them ----------------------

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


# --- prompts --------------------------------------------------------------------------------------


def prompt_text(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, prefill: str, where: str
) -> str:
    """Render turns up to the assistant's answer, and append the beginning of the answer.

    Without a template: the contents line by line.
    """
    if not has_template(tokenizer):
        return contents_of(turns) + prefill
    return render_turns(turns, tokenizer, where, add_generation_prompt=True) + prefill


def prompt_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of prompts; a template has written its special tokens itself."""
    if not texts:
        return []
    rows = tokenizer(list(texts), add_special_tokens=not has_template(tokenizer))["input_ids"]
    end = tokenizer.eos_token_id
    # Some tokenizers append an end token, but a prompt must not end.
    return [list(ids[:-1]) if len(ids) > 1 and ids[-1] == end else list(ids) for ids in rows]
