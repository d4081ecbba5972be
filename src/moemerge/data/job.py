"""Everything that can be refused, before a model is loaded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from moemerge.checkpoint.output import check_output_file
from moemerge.config.data import DataSettings
from moemerge.config.models import ModelRef
from moemerge.config.translate import parse_settings
from moemerge.data.selection import Benchmark, balanced, normal
from moemerge.errors import DataError, UsageError
from moemerge.generation.prompts import (
    USUAL,
    PromptRow,
    file_of,
    located,
    read_prompt,
    read_prompts,
)
from moemerge.registry import did_you_mean
from moemerge.text.reading import Rows
from moemerge.text.rows import TextRow, TextSource, read_rows, row_fields
from moemerge.verification.judgement import Verifier
from moemerge.verification.verifiers import make_verifier

NO_CHECK = "none"
MARK_BYTES = 12  # that tell one text from another: a chance of 1e-15 among ten million
SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class DataRequest:
    """Which model answers which prompts (or which text is taken), to which file."""

    model: str | Path | ModelRef
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
    """The prompts that are taken, and what was left out."""

    prompts: tuple[PromptRow, ...]
    read: int
    repeated: int
    contaminated: Mapping[str, int]


def check_request(request: DataRequest) -> None:
    """What contradicts itself, before any file is read."""
    settings = request.settings
    check_output_file(request.out, overwrite=request.overwrite)
    if not request.out.name.endswith(SUFFIXES):
        raise UsageError(
            f"the output {request.out} is of an unknown kind",
            hint=f"name it {' or '.join(SUFFIXES)}",
        )
    if settings.completions is not None:  # a file that is there is replaced
        check_output_file(settings.completions, overwrite=True)
    if bool(request.prompts) == bool(request.text):
        raise UsageError(
            "give prompts or plain text, one of them",
            hint="`prompts=FILE` for a model to answer, or `text=FILE` to take as it is",
        )
    if request.generates and settings.keep == "correct" and settings.verify == NO_CHECK:
        raise UsageError(
            "right answers are to be kept, but nothing says which are right",
            hint='`verify="math"` (or code, exact, choice, MODULE:FUNCTION), or `keep="all"`',
        )
    if not request.generates and settings.verify != NO_CHECK:
        raise UsageError(
            f"`verify` is {settings.verify}, but there are no answers to judge",
            hint='the model answers where `prompts` are given and `keep="correct"` or `keep="all"`',
        )


def select_prompts(request: DataRequest) -> Selected:
    """Read prompts; leave out repetitions and what benchmarks hold; take each group's share."""
    settings = request.settings
    rows = Rows(located(request.prompts))
    prompts = (read_prompt(row, settings, settings.balance) for row in rows)
    chosen = _choose(((prompt.group, prompt.asked) for prompt in prompts), settings)
    if not chosen.places:
        raise DataError(
            f"no prompt is left of {chosen.read}: {chosen.repeated} repeat others, "
            f"{sum(chosen.contaminated.values())} overlap with benchmarks"
        )
    taken = read_prompts(rows.take(chosen.places), settings, settings.balance)
    return Selected(tuple(taken), chosen.read, chosen.repeated, chosen.contaminated)


def select_texts(request: DataRequest) -> tuple[list[tuple[str, str]], Selected]:
    """(group, text) pairs taken of plain text, and what was left out."""
    settings = request.settings
    rows = Rows(located(request.text))
    chosen = _choose((read_text(row, settings) for row in rows), settings)
    taken = [read_text(row, settings) for row in rows.take(chosen.places)]
    return taken, Selected((), chosen.read, chosen.repeated, chosen.contaminated)


@dataclass(frozen=True)
class _Chosen:
    """Places of the rows that are taken, in order, and what was left out."""

    places: list[int]
    read: int
    repeated: int
    contaminated: Mapping[str, int]


def _choose(items: Iterable[tuple[str, str]], settings: DataSettings) -> _Chosen:
    """Of (group, text) pairs: none twice, none that a benchmark holds, each group its share.

    Texts themselves are not kept: there may be more of them than memory.
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
    return _Chosen([place for place, _ in taken], read, read - len(seen), dict(hits))


def _benchmarks(settings: DataSettings) -> list[Benchmark]:
    # A benchmark's columns are its own; its prompts are compared without any template.
    plain = parse_settings(DataSettings, {}, "data settings")
    return [
        Benchmark(
            name, (p.asked for p in read_prompts(read_rows(located([name])), plain)), settings.ngram
        )
        for name in settings.against
    ]


@contextmanager
def opened_verifier(settings: DataSettings) -> Iterator[Verifier | None]:
    """The check that is asked for, if one is; ended with the block."""
    if settings.verify == NO_CHECK:
        yield None
        return
    verifier = make_verifier(
        settings.verify, allow_code=settings.allow_code, workers=settings.workers
    )
    try:
        yield verifier
    finally:
        verifier.close()


def read_text(row: TextRow, settings: DataSettings) -> tuple[str, str]:
    """(group, text) of a row of plain text."""
    fields = row_fields(row)
    column = settings.map.get("text") or next((c for c in USUAL["text"] if c in fields), "text")
    if not isinstance(fields.get(column), str):
        raise DataError(
            f"{row.where}: no text in column {column!r}{did_you_mean(column, fields)}",
            hint=f'columns: {", ".join(fields)}; `map={{"text": COLUMN}}`',
        )
    group = str(fields.get(settings.balance)) if settings.balance else file_of(row.where)
    return group, fields[column]
