"""Requests for calibration text: all checks before a model is loaded, and the selection of rows."""

from __future__ import annotations

import os
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, TypeVar

from moemerge.config.faults import parse_settings
from moemerge.config.models import ModelLike
from moemerge.config.text_settings import DataSettings
from moemerge.errors import DataError, UsageError
from moemerge.lab.generate import USUAL, PromptRow, located, read_prompt, read_prompts
from moemerge.registry import did_you_mean
from moemerge.runtime.journals import completions_path
from moemerge.runtime.outputs import FileKind, check_output_file
from moemerge.text.reading import Rows
from moemerge.text.rows import TextRow, TextSource, file_of, read_rows, row_fields

T = TypeVar("T")
_SPACE: Final = re.compile(r"\s+")


def normal(text: str) -> str:
    """Return letters and digits in lower case: two texts with the same result are the same."""
    return _SPACE.sub(" ", unicodedata.normalize("NFKC", text)).strip().casefold()


def balanced(
    items: Sequence[T], group: Callable[[T], str], limit: int | None, rng: random.Random
) -> list[T]:
    """Draw at most `limit` items at random, in the order of the input. Groups get equal shares; the
    unused part of a small group's share goes to the others.
    """
    if limit is None or limit >= len(items):
        return list(items)
    places: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(group(item), []).append(place)
    for waiting in places.values():
        rng.shuffle(waiting)
    taken: list[int] = []
    left = limit
    # Smallest groups first: their unused share is known before the others are fixed.
    smallest_first = sorted(places.values(), key=len)
    for number, waiting in enumerate(smallest_first):
        share = left // (len(smallest_first) - number)
        taken += waiting[:share]
        left -= min(share, len(waiting))
    return [items[place] for place in sorted(taken)]


_WORD: Final = re.compile(r"\w+")


class Benchmark:
    """Problems that must not be trained or calibrated on, as n-grams of words."""

    def __init__(self, name: str, texts: Iterable[str], n: int) -> None:
        self.name = name
        self._n = n
        self._grams: set[tuple[str, ...]] = set()
        # A question shorter than n words is compared as a whole.
        self._short: set[tuple[str, ...]] = set()
        for text in texts:
            words = words_of(text)
            if len(words) < n:
                self._short.add(words)
            self._grams.update(grams(words, n))

    def overlaps(self, text: str) -> bool:
        words = words_of(text)
        if words in self._short:
            return True
        return any(gram in self._grams for gram in grams(words, self._n))


def words_of(text: str) -> tuple[str, ...]:
    """Return the words and numbers of a text, without case and punctuation."""
    return tuple(_WORD.findall(normal(text)))


def grams(words: Sequence[str], n: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[at : at + n]) for at in range(len(words) - n + 1))


NO_CHECK = "none"
MARK_BYTES = 12  # bytes of a text's hash: a collision has a chance of 1e-15 among ten million
OUTPUT_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class DataRequest:
    """The model, its prompts or plain text, and the output file."""

    model: ModelLike
    out: Path
    settings: DataSettings
    prompts: Sequence[TextSource] = ()
    text: Sequence[TextSource] = ()
    overwrite: bool = False

    @property
    def generates(self) -> bool:
        return bool(self.prompts) and self.settings.keep in ("correct", "all")


@dataclass(frozen=True)
class Selected:
    """Indices of the selected rows, in order, and counts of the others."""

    places: list[int]
    read: int
    repeated: int
    contaminated: Mapping[str, int]


def check_request(request: DataRequest) -> None:
    """Refuse contradictions, before any file is read."""
    settings = request.settings
    inputs = (request.model, *request.prompts, *request.text, *settings.against)
    check_output_file(request.out, FileKind.ROWS, overwrite=request.overwrite, inputs=inputs)
    if not request.out.name.endswith(OUTPUT_SUFFIXES):
        raise UsageError(
            f"the output {request.out} is of an unknown kind",
            hint=f"name it {' or '.join(OUTPUT_SUFFIXES)}",
        )
    if settings.completions is not None:
        # An unfinished run may have written it.
        overwrite = request.overwrite or os.path.exists(completions_path(request.out))
        check_output_file(settings.completions, FileKind.ROWS, overwrite=overwrite, inputs=inputs)
        if os.path.realpath(settings.completions) == os.path.realpath(request.out):
            raise UsageError(f"completions and rows would both be written to {request.out}")
    if bool(request.prompts) == bool(request.text):
        raise UsageError(
            "give prompts or plain text, one of them",
            hint="`prompts=FILE` for a model to answer, or `text=FILE` to use verbatim",
        )
    if request.generates and settings.keep == "correct" and settings.verify == NO_CHECK:
        raise UsageError(
            "only right answers are kept, but no check is given",
            hint='`verify="math"` (or code, exact, choice, MODULE:FUNCTION), or `keep="all"`',
        )
    if not request.generates and settings.verify != NO_CHECK:
        raise UsageError(
            f"`verify` is {settings.verify}, but there are no answers to judge",
            hint='the model answers only with `prompts` and `keep="correct"` or `keep="all"`',
        )


def select_prompts(request: DataRequest) -> tuple[list[PromptRow], Selected]:
    """Return the selected prompts, without repetitions and benchmark problems, and counts of the
    others.
    """
    settings = request.settings
    rows = Rows(located(request.prompts))
    prompts = (read_prompt(row, settings, settings.balance) for row in rows)
    chosen = _choose(((prompt.group, prompt.user_text) for prompt in prompts), settings)
    if not chosen.places:
        raise DataError(
            f"no prompt is left of {chosen.read}: {chosen.repeated} repeat others, "
            f"{sum(chosen.contaminated.values())} overlap with benchmarks"
        )
    return read_prompts(rows.take(chosen.places), settings, settings.balance), chosen


def select_texts(request: DataRequest) -> tuple[list[tuple[str, str]], Selected]:
    """Return the selected (group, text) pairs of plain text, and counts of the others."""
    settings = request.settings
    rows = Rows(located(request.text))
    chosen = _choose((text_of(row, settings) for row in rows), settings)
    return [text_of(row, settings) for row in rows.take(chosen.places)], chosen


def _choose(items: Iterable[tuple[str, str]], settings: DataSettings) -> Selected:
    """Select from (group, text) pairs: no repetitions, no benchmark problems, equal shares.

    Texts are not kept, because they may not fit into memory.
    """
    benchmarks = _benchmarks(settings)
    hits: Counter[str] = Counter({benchmark.name: 0 for benchmark in benchmarks})
    seen: set[bytes] = set()
    clean: list[tuple[int, str]] = []
    read = 0
    for place, (group, text) in enumerate(items):
        read = place + 1
        mark = blake2b(normal(text).encode(errors="surrogatepass"), digest_size=MARK_BYTES).digest()
        if mark in seen:
            continue
        seen.add(mark)
        name = next((b.name for b in benchmarks if b.overlaps(text)), None)
        if name is None:
            clean.append((place, group))
        else:
            hits[name] += 1
    rng = random.Random(settings.seed)
    taken = balanced(clean, lambda pair: pair[1], settings.limit, rng)
    return Selected([place for place, _ in taken], read, read - len(seen), dict(hits))


def _benchmarks(settings: DataSettings) -> list[Benchmark]:
    # A benchmark has its own columns; its prompts are compared without a template.
    plain = parse_settings(DataSettings, {}, "data settings")
    return [
        Benchmark(
            name,
            (p.user_text for p in read_prompts(read_rows(located([name])), plain)),
            settings.ngram,
        )
        for name in settings.against
    ]


def text_of(row: TextRow, settings: DataSettings) -> tuple[str, str]:
    """Return (group, text) of a row of plain text."""
    fields = row_fields(row)
    column = settings.map.get("text") or next((c for c in USUAL["text"] if c in fields), "text")
    if not isinstance(fields.get(column), str):
        raise DataError(
            f"{row.where}: no text in column {column!r}{did_you_mean(column, fields)}",
            hint=f'columns: {", ".join(fields)}; `map={{"text": COLUMN}}`',
        )
    group = str(fields.get(settings.balance)) if settings.balance else file_of(row.where)
    return group, fields[column]
