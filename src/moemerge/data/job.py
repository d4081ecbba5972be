"""Everything that can be refused, before a model is loaded."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moemerge.config.data import DataSettings
from moemerge.config.models import ModelRef
from moemerge.config.translate import parse_settings
from moemerge.data.contamination import Benchmark
from moemerge.data.selection import balanced, distinct, normal
from moemerge.data.texts import read_texts
from moemerge.errors import DataError, UsageError
from moemerge.generation.prompts import PromptRow, located, read_prompts
from moemerge.statistics.writer import check_output_file
from moemerge.text.rows import TextSource, read_rows
from moemerge.verification.judgement import Verifier
from moemerge.verification.verifiers import make_verifier

NO_CHECK = "none"
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
    rows = read_prompts(read_rows(located(request.prompts)), settings, settings.balance)
    once = distinct(rows, key=lambda row: normal(row.asked))
    clean, contaminated = _decontaminated(once, settings)
    rng = random.Random(settings.seed)
    taken = balanced(clean, lambda row: row.group, settings.limit, rng)
    if not taken:
        raise DataError(
            f"no prompt is left of {len(rows)}: {len(rows) - len(once)} repeat others, "
            f"{sum(contaminated.values())} overlap with benchmarks"
        )
    return Selected(tuple(taken), len(rows), len(rows) - len(once), contaminated)


def select_texts(request: DataRequest) -> tuple[list[tuple[str, str]], Selected]:
    """(group, text) pairs taken of plain text, and what was left out."""
    settings = request.settings
    texts = read_texts(read_rows(located(request.text)), settings)
    once = distinct(texts, key=lambda pair: normal(pair[1]))
    clean: list[tuple[str, str]] = []
    hits: Counter[str] = Counter()
    benchmarks = _benchmarks(settings)
    for pair in once:
        name = next((b.name for b in benchmarks if b.overlaps(pair[1])), None)
        if name is None:
            clean.append(pair)
        else:
            hits[name] += 1
    taken = balanced(clean, lambda pair: pair[0], settings.limit, random.Random(settings.seed))
    return taken, Selected((), len(texts), len(texts) - len(once), dict(hits))


def _decontaminated(
    rows: Sequence[PromptRow], settings: DataSettings
) -> tuple[list[PromptRow], dict[str, int]]:
    benchmarks = _benchmarks(settings)
    hits: Counter[str] = Counter({benchmark.name: 0 for benchmark in benchmarks})
    clean = []
    for row in rows:
        name = next((b.name for b in benchmarks if b.overlaps(row.asked)), None)
        if name is None:
            clean.append(row)
        else:
            hits[name] += 1
    return clean, dict(hits)


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
