"""Read files of rows, and parse the row formats. Needs neither torch nor transformers."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import stat
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moemerge.errors import DataError
from moemerge.registry import did_you_mean
from moemerge.runtime.files import TEXT_SUFFIXES, open_file_or_pipe, parse_object, write_whole
from moemerge.runtime.progress import counted

ROW_FORMATS = (
    'a row is {"text": ...}, {"messages": [...]}, {"conversations": [...]}, '
    '{"prompt": ..., "response" or "completion": ...?}, '
    '{"instruction": ..., "input": ...?, "output": ...?} or {"question": ..., "answer": ...?}; '
    '`map="prompt=problem,response=solution"` names other columns'
)
# The keys that each format reads. The first key identifies it, and the first matching format wins.
FORM_KEYS = {
    "messages": ("messages",),
    "prompt": ("prompt", "response", "completion"),
    "text": ("text",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "input", "output"),
    "question": ("question", "answer"),
}
# Largest text in memory, and largest ratio of unpacking: a small packed file may contain any
# amount.
MOST_TEXT_BYTES = 2**29
MOST_ROW_BYTES = 2**26
MOST_TIMES = 200  # unpacked size divided by the file's
PARQUET_ROWS = 64  # decoded at once
BYTES_PER_VALUE = 16  # in memory, besides its text
# Rows of a file whose format is checked before any work is done.
CHECKED_ROWS = 100
# Roles of ShareGPT's `from`.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}

# Text is given as a file's path, or as rows in memory.
TextSource = str | Path | Mapping[str, Any]
Turn = dict[str, Any]  # role, content
# Columns of rows in other formats, by `text`, `prompt` and `response`.
Columns = Mapping[Any, str]


@dataclass(frozen=True)
class TextRow:
    """A row as read: the bytes of a line, or a mapping."""

    where: str  # counted from 1
    content: bytes | Mapping[str, Any]
    size: int = 0  # in bytes, if it comes from a file
    unread: tuple[str, ...] = ()  # columns of its file that the job does not need


@dataclass(frozen=True)
class Conversation:
    """Turns for the tokenizer's chat template."""

    turns: tuple[Turn, ...]
    key: str  # the key it was read from
    # Whether it can be rendered without a template, as its contents line by line.
    joinable: bool = False


# --- files --------------------------------------------------------------------------------------


def check_file(path: Path, where: str = "") -> None:
    """Check that a file exists and has a known format; errors begin with `where`."""
    hint = f"use {', '.join(TEXT_SUFFIXES)}, or /dev/stdin"
    if os.path.isdir(path):
        raise DataError(f"{where}{path} is a folder, expected a file of text", hint=hint)
    if is_pipe(path):
        return
    if not path.name.lower().endswith(TEXT_SUFFIXES):
        raise DataError(f"{where}{path} is of an unknown kind {path.suffix!r}", hint=hint)
    if not os.path.isfile(path):
        raise DataError(f"{where}no such file {path}")


def check_files(data: Mapping[str, Sequence[TextSource]], what: str = "data") -> None:
    """Check that every file of every domain exists and has a known format."""
    for name, sources in data.items():
        for source in sources:
            if not isinstance(source, Mapping):
                check_file(Path(source), f"{what} {name!r}: ")


def check_text(
    data: Mapping[str, Sequence[TextSource]],
    what: str = "data",
    columns: Columns | None = None,
) -> None:
    """Check all files, and the format of the first rows of each; `columns` as in `parse_row`."""
    check_files(data, what)
    for sources in data.values():
        for source in sources:
            # A pipe can be read only once.
            if isinstance(source, Mapping) or not is_pipe(Path(source)):
                for row in read_rows([source], CHECKED_ROWS, wanted_columns(columns)):
                    parse_row(row, columns=columns)


def source_names(sources: Sequence[TextSource]) -> tuple[str, ...]:
    """Return the names of text for a report: its files, and the number of rows from memory."""
    files = tuple(str(source) for source in sources if not isinstance(source, Mapping))
    count = len(sources) - len(files)
    return files if not count else (*files, f"<{counted(count, 'row')} in memory>")


def read_rows(
    sources: Sequence[TextSource], most: int | None = None, wanted: Collection[str] | None = None
) -> list[TextRow]:
    """Return the rows of all files (the first `most` of each) and those in memory, in order.

    Only the `wanted` columns of a parquet file are read; None means all.
    """
    rows: list[TextRow] = []
    size = 0
    for row in stream_rows(sources, most, wanted):
        rows.append(row)
        size += row.size
        if size > MOST_TEXT_BYTES:
            raise too_large(row.where)
    return rows


def too_large(where: str) -> DataError:
    """Return the error for text that does not fit into memory."""
    return DataError(
        f"{where}: the text of one domain has more than {MOST_TEXT_BYTES >> 20} MiB",
        hint="a few thousand rows are enough: `limit=5000`, or a part of the file",
    )


def stream_rows(
    sources: Sequence[TextSource], most: int | None = None, wanted: Collection[str] | None = None
) -> Iterator[TextRow]:
    """Yield the same rows one by one, with only a few in memory."""
    for number, source in enumerate(sources, 1):
        if isinstance(source, Mapping):
            yield TextRow(f"row {number} in memory", source)
        else:
            yield from _rows_of(Path(source), most, wanted)


def _rows_of(path: Path, most: int | None, wanted: Collection[str] | None) -> Iterator[TextRow]:
    check_file(path)
    parquet = path.name.lower().endswith(".parquet")
    rows = _parquet_rows(path, wanted) if parquet else _json_lines(path)
    row = None
    try:
        for row in itertools.islice(rows, most):
            yield row
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if row is None:
        raise DataError(f"{path}: the file is empty, expected rows of text", hint=ROW_FORMATS)


def is_pipe(path: Path) -> bool:
    """Return whether this is standard input or a pipe, which contain JSON lines under any name."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or str(path) == "/dev/stdin"


def _json_lines(path: Path) -> Iterator[TextRow]:
    try:
        with open(open_file_or_pipe(path), "rb") as file:
            lines: Any = file
            packed = 0
            if path.suffix.lower() == ".gz":
                lines, packed = gzip.GzipFile(fileobj=file), path.stat().st_size
            for number in itertools.count(1):
                line = lines.readline(MOST_ROW_BYTES + 1)
                if len(line) > MOST_ROW_BYTES:
                    raise DataError(
                        f"{path}, row {number} has more than {MOST_ROW_BYTES >> 20} MiB",
                        hint="write one JSON object per line, with one conversation or page each",
                    )
                if not line:
                    return
                if packed and lines.tell() > max(MOST_TEXT_BYTES, MOST_TIMES * packed):
                    raise _bomb(f"{path}, row {number}")
                if line.strip():
                    yield TextRow(f"{path}, row {number}", line, len(line))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from error


def _parquet_rows(path: Path, wanted: Collection[str] | None) -> Iterator[TextRow]:
    """Yield the rows of a table, with only the `wanted` columns, one row group after the other."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path}: reading parquet needs the package pyarrow, which is not installed",
            hint="pip install 'moemerge[parquet]', or convert the file to .jsonl",
        ) from None
    arrow = importlib.import_module("pyarrow")
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        read = [name for name in names if wanted is None or name in wanted]
        unread = tuple(name for name in names if name not in read)
        leaves = [table.schema.column(n) for n in range(len(table.schema.names))]
        texts = [
            leaf.path
            for leaf in leaves
            if leaf.physical_type == "BYTE_ARRAY" and leaf.logical_type.type != "DECIMAL"
        ]
        packed = parquet.ParquetFile(path, read_dictionary=texts)
        most, unpacked, number = max(MOST_TEXT_BYTES, MOST_TIMES * path.stat().st_size), 0, 0
        for group in range(table.num_row_groups):
            columns = table.metadata.row_group(group)
            chunks = [columns.column(n) for n in range(columns.num_columns)]
            stored = sum(
                chunk.total_uncompressed_size
                for chunk in chunks
                if chunk.path_in_schema.partition(".")[0] in read
            )
            # Strings stay in Arrow's dictionaries here: one that repeats is in memory once.
            if stored <= most and read:
                unpacked += _decoded_bytes(packed.read_row_group(group, columns=read))
            if max(stored, unpacked) > most:
                raise _bomb(f"{path}, row {number + 1}")
            for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group], columns=read):
                size = _decoded_bytes(batch) // len(batch)
                if size > MOST_ROW_BYTES:
                    raise DataError(
                        f"{path}: rows from {number + 1} on have more than "
                        f"{MOST_ROW_BYTES >> 20} MiB each",
                        hint="a row is a conversation or a page",
                    )
                for row in batch.to_pylist():
                    number += 1
                    yield TextRow(f"{path}, row {number}", row, size, unread)
    except (arrow.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        # The last two are dates that Python cannot represent, and unknown time zones.
        raise DataError(f"{path}: not a readable parquet file ({error})") from error


def _decoded_bytes(values: Any) -> int:
    """Return the size of an Arrow table or array once every value has its own copy of its text."""
    arrow, compute = (importlib.import_module(f"pyarrow{part}") for part in ("", ".compute"))
    if not isinstance(values, arrow.Array):  # a table, a batch of rows, or a column in chunks
        return sum(map(_decoded_bytes, getattr(values, "chunks", None) or values.columns))
    size = BYTES_PER_VALUE * len(values)
    if arrow.types.is_dictionary(values.type):
        lengths = compute.binary_length(values.dictionary).take(values.indices)
        return size + int(compute.sum(lengths).as_py() or 0)
    if arrow.types.is_struct(values.type):
        return size + sum(map(_decoded_bytes, values.flatten()))
    if arrow.types.is_map(values.type):
        return size + _decoded_bytes(values.keys) + _decoded_bytes(values.items)
    if arrow.types.is_nested(values.type):
        return size + _decoded_bytes(values.flatten())
    return size + int(values.nbytes)


def _bomb(where: str) -> DataError:
    return DataError(
        f"{where}: the file unpacks to more than {MOST_TIMES} times its size, which text does not",
        hint="unpack it, and see what it holds",
    )


# --- forms --------------------------------------------------------------------------------------


def wanted_columns(columns: Columns | None = None, group: str | None = None) -> set[str]:
    """Return the columns that `parse_row` may read, and that of a `group`."""
    forms = {key for keys in FORM_KEYS.values() for key in keys}
    return {*forms, *(columns or {}).values(), *filter(None, [group])}


class UnreadKeys:
    """Collects keys that the rows' format does not read, to report them once per file."""

    def __init__(self, *also: str) -> None:
        self._also = also  # keys that are read for another purpose
        # All keys of the rows of one format, by file.
        self._keys: dict[tuple[str, str], dict[str, None]] = {}
        self._unmapped: dict[str, tuple[str, ...]] = {}  # columns that a file does not have

    def add(self, where: str, form: str, keys: Iterable[str]) -> None:
        self._keys.setdefault((file_of(where), form), {}).update(dict.fromkeys(keys))

    def add_unmapped(self, where: str, columns: Iterable[str]) -> None:
        """Note a row without the columns of `map`, which is read by its own format."""
        self._unmapped.setdefault(file_of(where), tuple(columns))

    def notices(self) -> Iterator[str]:
        for origin, columns in self._unmapped.items():
            yield f"{origin}: there are rows without {', '.join(columns)}: `map` is not used there"
        for (origin, form), keys in self._keys.items():
            lacking = [key for key in FORM_KEYS[form] if key not in keys]
            unread = [key for key in keys if key not in (*FORM_KEYS[form], *self._also)]
            if unread:
                read = ", ".join(key for key in FORM_KEYS[form] if key in keys)
                named = ", ".join(_with_guess(key, lacking) for key in unread)
                yield f"{origin}: only {read} of each row is used, not {named}"


def file_of(where: str) -> str:
    """Return the file of a row at this location."""
    return where.rpartition(", row ")[0] or "rows in memory"


def _with_guess(key: str, known: Iterable[str]) -> str:
    guess = did_you_mean(key, known).removeprefix(", ")
    return f"{key!r} ({guess})" if guess else repr(key)


def parse_row(
    row: TextRow, unread: UnreadKeys | None = None, columns: Columns | None = None
) -> str | Conversation:
    """Return plain text or turns; `unread` collects keys that this format does not read.

    `columns` are the columns of text, prompt and response. A row without any of them is read by
    its own format.
    """
    fields = row_fields(row)
    if columns and any(column in fields for column in columns.values()):
        for name, column in columns.items():
            if column not in fields:
                found = (*fields, *row.unread)
                raise DataError(
                    f"{row.where}: no column {column!r} for {name}{did_you_mean(column, found)}",
                    hint=f"columns: {', '.join(found)}",
                )
        fields = {name: fields[column] for name, column in columns.items()}
    elif columns and unread is not None:
        unread.add_unmapped(row.where, columns.values())
    form = next((form for form in FORM_KEYS if form in fields), None)
    if form is None:
        first = (*fields, *row.unread)[:20]
        keys = ", ".join(f"{key!r:.80}" for key in first) or "none"
        raise DataError(f"{row.where}: unknown form, keys found: {keys}", hint=ROW_FORMATS)
    if unread is not None:
        unread.add(row.where, form, (*fields, *row.unread))
    if form == "text":
        return _string(fields, form, row.where)
    if form in ("messages", "conversations"):
        return Conversation(turns_of(fields, form, row.where), form)
    if form == "instruction" and "input" in fields:
        parts = [_string(fields, key, row.where) for key in ("instruction", "input")]
        fields["instruction"] = "\n\n".join(parts) if parts[1] else parts[0]
        del fields["input"]
    return _prompt(fields, form, row.where)


def row_fields(row: TextRow) -> dict[str, Any]:
    """Return a row's values by key, without None: a parquet table has all columns in every row."""
    content = row.content
    if not isinstance(content, Mapping):
        hint = f"one JSON object per line; {ROW_FORMATS}"
        content = parse_object(content, row.where, hint, DataError)
    return {str(key): value for key, value in content.items() if value is not None}


def _prompt(fields: Mapping[str, Any], form: str, where: str) -> Conversation:
    """Parse a prompt with or without its answer: strings, or lists of messages as in trl."""
    answers = [key for key in FORM_KEYS[form][1:] if key in fields]
    if len(answers) > 1:
        raise DataError(f"{where}: both 'response' and 'completion', expected one answer")
    turns = said(fields, form, "user", where)
    for key in answers:
        turns += said(fields, key, "assistant", where)
    listed = any(not isinstance(fields[key], str) for key in (form, *answers))
    return Conversation(turns, form, joinable=not listed)


def _string(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {type(value).__name__}, expected a string")
    return value


def said(fields: Mapping[str, Any], key: str, role: str, where: str) -> tuple[Turn, ...]:
    """Return a string as a turn of `role`, or a list of messages."""
    value = fields[key]
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return turns_of(fields, key, where)
    return ({"role": role, "content": _string(fields, key, where)},)


def turns_of(fields: Mapping[str, Any], key: str, where: str) -> tuple[Turn, ...]:
    value = fields[key]
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping):
        raise DataError(f"{where}: {key!r} is {type(value).__name__}, expected a list")
    turns = tuple(_turn(turn, where) for turn in value)
    if not turns:
        raise DataError(f"{where}: {key!r} is an empty list, expected at least one turn")
    return turns


def _turn(turn: Any, where: str) -> Turn:
    """Parse {role, content}, or ShareGPT's {from, value}."""
    if isinstance(turn, Mapping) and "role" in turn and "content" in turn:
        return dict(turn)
    if isinstance(turn, Mapping) and "from" in turn and "value" in turn:
        role = SPEAKERS.get(str(turn["from"]).lower())
        if role is None:
            known = ", ".join(SPEAKERS)
            raise DataError(
                f"{where}: a turn is from {turn['from']!r:.80}, expected one of {known}"
            )
        return {"role": role, "content": turn["value"]}
    raise DataError(
        f"{where}: a message is {turn!r:.80}, expected an object with role and content "
        "(or from and value)"
    )


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, gzipped if the name ends with .gz, to a temporary file and rename it."""
    # Lone surrogates, with which a cut text may end, cannot be encoded in UTF-8.
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = "".join(lines).encode("utf-8", "replace")
    if path.name.endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    write_whole(path, data)
