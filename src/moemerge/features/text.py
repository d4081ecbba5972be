"""Calibration text: files of rows -> token rows of named domains."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moemerge.errors import DataError, TokenizerError, UsageError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
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
ROWS_AT_ONCE = 128  # handed to the tokenizer together, which has threads of its own
FORMS = 'a row is {"messages": [...]}, {"prompt": ..., "response": ...?} or {"text": ...}'


@dataclass(frozen=True)
class TextOptions:
    """How much of a file is used. `None` means no bound."""

    max_length: int | None = 2048  # tokens of one row
    max_tokens: int | None = None  # tokens of one domain
    limit: int | None = None  # rows of one domain
    holdout: float = 0.0  # share of the rows kept out of every solve
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_length", "max_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}, expected at least 1")
        if not 0 <= self.holdout < 1:
            raise UsageError(f"holdout is {self.holdout}, expected 0 <= holdout < 1")


@dataclass(frozen=True, eq=False)
class Domain:
    """The token rows of one domain, in the order of its files."""

    name: str
    rows: tuple[Tensor, ...]  # each (tokens,), int64
    holdout: tuple[Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def holdout_tokens(self) -> int:
        return sum(len(row) for row in self.holdout)


def load_tokenizer(
    folder: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that lies in a model folder."""
    if not any(next(Path(folder).glob(pattern), None) for pattern in VOCABULARIES):
        raise TokenizerError(
            f"{folder}: no usable tokenizer (none of {', '.join(VOCABULARIES)})",
            hint="copy the tokenizer files of one of the sources into the model folder",
        )
    try:
        return AutoTokenizer.from_pretrained(  # type: ignore[no-any-return,no-untyped-call,unused-ignore]
            str(folder), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TokenizerError(
            f"{folder}: no usable tokenizer ({type(error).__name__}: {_first_line(error)})",
            hint="copy the tokenizer files of one of the sources into the model folder",
        ) from error


def load_domains(
    files: Mapping[str, str | Path | Sequence[str | Path]],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions | None = None,
) -> tuple[Domain, ...]:
    """One domain per name, in the order given."""
    options = TextOptions() if options is None else options
    if not files:
        raise DataError("no calibration text given", hint="name a file for each domain")
    return tuple(load_domain(name, path, tokenizer, options) for name, path in files.items())


def load_domain(
    name: str,
    files: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions | None = None,
) -> Domain:
    """Rows of a file (or several) as tokens; where a bound applies, the seed chooses the rows."""
    options = TextOptions() if options is None else options
    paths = [Path(p) for p in ([files] if isinstance(files, str | Path) else files)]
    rows = [row for path in paths for row in _rows_of(path)]
    # The name is part of the seed, so that two domains of one file do not take the same rows.
    chance = random.Random(options.seed * 0x1_0000_0000 + zlib.crc32(name.encode()))
    taken = _take(rows, tokenizer, options, chance)
    if not taken:
        raise DataError(
            f"{', '.join(map(str, paths))}: no token for domain {name!r} in {len(rows)} rows",
            hint="every row was empty after tokenizing; give a file with text",
        )
    held = _held_out(len(taken), name, options, chance)
    return Domain(
        name=name,
        rows=tuple(row for place, row in enumerate(taken) if place not in held),
        holdout=tuple(row for place, row in enumerate(taken) if place in held),
    )


def _held_out(count: int, name: str, options: TextOptions, chance: random.Random) -> set[int]:
    if options.holdout == 0:
        return set()
    wanted = max(1, round(options.holdout * count))
    if wanted >= count:
        raise DataError(
            f"domain {name!r} has {count} row(s): a holdout of {options.holdout} leaves none to "
            "calibrate on",
            hint="give more rows or set the holdout to 0",
        )
    return set(chance.sample(range(count), wanted))


# --- reading ------------------------------------------------------------------------------------

Row = tuple[str, Any]  # where it stands, as a person counts; bytes of a line, or a mapping


def check_file(path: Path, where: str = "") -> None:
    """It exists and is of a kind that can be read; errors begin with `where`."""
    hint = f"use {', '.join(SUFFIXES)}"
    if path.is_dir():
        raise DataError(f"{where}{path} is a folder, expected a file of text", hint=hint)
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{where}{path} is of an unknown kind {path.suffix!r}", hint=hint)
    if not path.is_file():
        raise DataError(f"{where}no such file {path}")


def _rows_of(path: Path) -> list[Row]:
    check_file(path)
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_lines(path)
    if not rows:
        raise DataError(f"{path}: the file is empty, expected rows of text", hint=FORMS)
    return rows


def _json_lines(path: Path) -> list[Row]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as lines:
            return [
                (f"{path}, row {number}", line)
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from error


def _parquet_rows(path: Path) -> list[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs the package pyarrow, which is not installed",
            hint="pip install pyarrow, or convert the file to .jsonl",
        ) from None
    arrow = importlib.import_module("pyarrow")
    try:
        found = parquet.read_table(path).to_pylist()
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error})") from error
    return [(f"{path}, row {number}", row) for number, row in enumerate(found, 1)]


def _parsed(content: Any, where: str) -> Mapping[str, Any]:
    if isinstance(content, Mapping):
        # A parquet table gives every row all columns; a missing value is None.
        return {key: value for key, value in content.items() if value is not None}
    try:
        row = json.loads(content)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})", hint="one JSON object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: got a JSON {type(row).__name__}, expected an object", hint=FORMS)
    return row


# --- sampling -----------------------------------------------------------------------------------


def _take(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    chance: random.Random,
) -> list[Tensor]:
    """Rows in a seeded order until a bound is met, then put back into the order of the file."""
    order = list(range(len(rows)))
    if options.limit is not None or options.max_tokens is not None:
        chance.shuffle(order)
    taken: dict[int, Tensor] = {}
    left = options.max_tokens
    found = _tokenized([rows[place] for place in order], tokenizer)
    for place in order:
        if len(taken) == options.limit or left == 0:
            break
        tokens = next(found)[: options.max_length]
        tokens = tokens[:left]
        if not tokens:
            continue
        taken[place] = torch.tensor(tokens, dtype=torch.int64)
        left = None if left is None else left - len(tokens)
    return [taken[place] for place in sorted(taken)]


# --- tokenizing ---------------------------------------------------------------------------------


def tokenize_row(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> list[int]:
    """Token ids of one row; `where` names it in errors."""
    return _ids_of([_text_or_tokens(row, tokenizer, where)], tokenizer)[0]


def _tokenized(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Rows one by one, tokenized some at a time; a bad row is an error when its turn comes."""
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        ready: list[str | list[int]] = []
        error: DataError | None = None
        for where, content in rows[begin : begin + ROWS_AT_ONCE]:
            try:
                ready.append(_text_or_tokens(_parsed(content, where), tokenizer, where))
            except DataError as found:
                error = found
                break
        yield from _ids_of(ready, tokenizer)
        if error is not None:
            raise error


def _ids_of(rows: Sequence[str | list[int]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    texts = [row for row in rows if isinstance(row, str)]
    encoded = iter(tokenizer(texts)["input_ids"] if texts else ())
    return [_ids(next(encoded)) if isinstance(row, str) else row for row in rows]


def _text_or_tokens(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str
) -> str | list[int]:
    """Plain text that is still to be tokenized, or what a chat template has made."""
    if "messages" in row:
        return _chat(_turns(row["messages"], where), tokenizer, where)
    if "prompt" in row:
        prompt = _string(row, "prompt", where)
        turns = [{"role": "user", "content": prompt}]
        if row.get("response") is not None:
            turns.append({"role": "assistant", "content": _string(row, "response", where)})
        if getattr(tokenizer, "chat_template", None):
            return _chat(turns, tokenizer, where)
        return "\n".join(turn["content"] for turn in turns)
    if "text" in row:
        return _string(row, "text", where)
    found = ", ".join(map(repr, row)) or "none"
    raise DataError(f"{where}: unknown form, keys found: {found}", hint=FORMS)


def _string(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {type(value).__name__}, expected a string")
    return value


def _turns(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, Iterable) or isinstance(messages, str | Mapping):
        raise DataError(f"{where}: 'messages' is {type(messages).__name__}, expected a list")
    turns = list(messages)
    for turn in turns:
        if not isinstance(turn, Mapping) or "role" not in turn or "content" not in turn:
            raise DataError(
                f"{where}: a message is {turn!r:.80}, expected an object with role and content"
            )
    if not turns:
        raise DataError(f"{where}: 'messages' is an empty list, expected at least one turn")
    return [dict(turn) for turn in turns]


def _chat(turns: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where}: a 'messages' row needs a chat template, and the tokenizer has none",
            hint="use rows with 'text' or 'prompt', or add chat_template.jinja to the model folder",
        )
    try:
        ids = tokenizer.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=False, return_dict=False
        )
    except TemplateError as error:
        raise DataError(
            f"{where}: the tokenizer's chat template refuses this row ({_first_line(error)})"
        ) from error
    return _ids(ids)


def _ids(ids: Any) -> list[int]:
    return [int(token) for token in ids]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
