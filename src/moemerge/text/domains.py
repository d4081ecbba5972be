"""The text of one source as tokens, and which rows of its files are used."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moemerge.config.fields import Strict
from moemerge.config.settings import AUTO_HOLDOUT, AUTO_HOLDOUT_ROWS
from moemerge.errors import DataError
from moemerge.runtime.progress import counted
from moemerge.text.reading import Rows
from moemerge.text.rows import (
    MOST_TEXT_BYTES,
    Columns,
    TextSource,
    UnreadKeys,
    row_fields,
    source_names,
    too_large,
    wanted_columns,
)
from moemerge.text.tokens import JOINED, RowText, answer_spans, mask_by_prefixes, tokenize

Holdout = float | Literal["auto"]


@dataclass(frozen=True)
class TextSettings:
    """How much of a domain's text is used. `None` means no bound."""

    max_length: int | None = None  # tokens of one row
    max_tokens: int | None = None  # tokens of one domain
    limit: int | None = None  # rows of one domain
    holdout: Holdout = 0.0  # share of the rows held out of every solve
    seed: int = 0
    group: str | None = None  # field of a row: rows that share its value are not split
    map: Columns = field(default_factory=dict)  # columns, as in `parse_row`
    answers: bool = False  # whether to find the tokens of answers

    @classmethod
    def of(cls, settings: Strict, *, answers: bool = False) -> Self:
        """Return those of a job; a setting that it does not have is the default."""
        names = {one.name for one in fields(cls)} & type(settings).model_fields.keys()
        return cls(**{name: getattr(settings, name) for name in names}, answers=answers)


@dataclass(frozen=True, eq=False)
class Domain:
    """The token rows of one domain, in the order of its files."""

    name: str
    rows: tuple[Tensor, ...]  # each (tokens,), int64
    held_out: Domain | None = None  # rows that are held out of every solve
    notices: tuple[str, ...] = ()  # unread keys, cut rows
    # A mask of each row's answers, (tokens,) bool, in the order of the rows; of plain text all is
    # True. Empty if no row has a prompt and an answer, or if they were not searched.
    answers: tuple[Tensor, ...] = ()
    # Each row's value of the settings' `group`; empty without one.
    groups: tuple[str, ...] = ()

    @property
    def holdout(self) -> tuple[Tensor, ...]:
        return () if self.held_out is None else self.held_out.rows

    @property
    def tokens(self) -> int:
        return sum(len(row) for row in self.rows)


def load_domains(
    data: Mapping[str, str | Path | Sequence[TextSource]],
    tokenizer: PreTrainedTokenizerBase,
    settings: TextSettings | None = None,
) -> tuple[Domain, ...]:
    """Return one domain per name, in the order given."""
    if not data:
        raise DataError("no calibration text given", hint="name a file for each domain")
    return tuple(load_domain(name, text, tokenizer, settings) for name, text in data.items())


def load_domain(
    name: str,
    sources: str | Path | Sequence[TextSource],
    tokenizer: PreTrainedTokenizerBase,
    settings: TextSettings | None = None,
) -> Domain:
    """Return rows as tokens; if a bound applies, the seed selects the rows."""
    settings = settings or TextSettings()
    sources = [sources] if isinstance(sources, str | Path) else sources
    rows = Rows(sources, wanted_columns(settings.map, settings.group))
    # The name is part of the seed: two domains of one file use different rows.
    rng = random.Random(settings.seed * 0x1_0000_0000 + zlib.crc32(name.encode()))
    unread = UnreadKeys(*filter(None, [settings.group]))
    where = ", ".join(source_names(sources))
    taken, cut = _take(rows, tokenizer, settings, rng, unread, where)
    if not taken:
        raise DataError(
            f"{where}: no token for domain {name!r} in {counted(len(rows), 'row')}",
            hint="every row was empty after tokenizing; give a file with text",
        )
    notices = [*unread.notices()]
    if cut:
        notices.append(
            f"{name}: {cut} of {counted(len(taken), 'row')} longer than `max_length`, "
            f"{settings.max_length} tokens: cut there"
        )
    if any(row.joined for row in taken):
        notices.append(JOINED)
    held = _held_out(taken, name, settings, rng)
    masked = any(row.answers is not None for row in taken)

    def part(some: Sequence[_Taken]) -> Domain:
        return Domain(
            name,
            tuple(row.tokens for row in some),
            answers=tuple(row.mask for row in some) if masked else (),
            groups=tuple(row.group for row in some) if settings.group is not None else (),
        )

    kept = part([row for at, row in enumerate(taken) if at not in held])
    held_out = part([taken[at] for at in sorted(held)]) if held else None
    return replace(kept, held_out=held_out, notices=tuple(notices))


@dataclass(frozen=True, eq=False)
class _Taken:
    """A row that is used."""

    tokens: Tensor
    answers: Tensor | None  # a mask of the tokens of answers; None if all count
    group: str  # its value of the settings' `group`
    joined: bool

    @property
    def mask(self) -> Tensor:
        if self.answers is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return self.answers


def _take(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    settings: TextSettings,
    rng: random.Random,
    unread: UnreadKeys,
    where: str,
) -> tuple[list[_Taken], int]:
    """Draw rows in a seeded order until a bound is met, and return them in file order, with the
    number of rows that were too long.
    """
    bounded = settings.limit is not None or settings.max_tokens is not None
    if not bounded and rows.size > MOST_TEXT_BYTES:
        raise too_large(where)
    order, ordered = rows.drawn(rng if bounded else None)
    taken: dict[int, _Taken] = {}
    left, cut = settings.max_tokens, 0
    tokenized = tokenize(
        ordered, tokenizer, unread, lambda: _lesser(settings.max_length, left), settings.map
    )
    for at in order:
        if len(taken) == settings.limit or left == 0:
            break
        text, whole = next(tokenized)
        tokens = whole[: settings.max_length][:left]
        if not tokens:
            continue
        cut += settings.max_length is not None and len(whole) > settings.max_length
        left = None if left is None else left - len(tokens)
        taken[at] = _Taken(
            torch.tensor(tokens, dtype=torch.int64),
            _answers(text, tokens, tokenizer) if settings.answers else None,
            "" if settings.group is None else _group(text, settings.group),
            text.joined,
        )
    return [taken[at] for at in sorted(taken)], cut


def _group(text: RowText, field: str) -> str:
    found = row_fields(text.row)
    if field not in found:
        raise DataError(
            f"{text.where}: no field {field!r}, which `group` names; keys found: "
            f"{', '.join(found)}",
            hint="every row needs it: the document, package or page that it comes from",
        )
    return str(found[field])


def _answers(
    text: RowText, tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Tensor | None:
    """Return a mask of the tokens of answers; None if all count: plain text, or a lone prompt.

    All count too if the chat template hides where the last answer begins.
    """
    spans = answer_spans(text, tokenizer)
    if not spans or spans[-1] is None:
        return None
    known = [span for span in spans if span is not None]
    return torch.tensor(mask_by_prefixes(tokens, text, known, tokenizer), dtype=torch.bool)


def _lesser(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _held_out(
    taken: Sequence[_Taken], name: str, settings: TextSettings, rng: random.Random
) -> set[int]:
    """Return the indices of held-out rows: a share of the units, each with all of its rows."""
    share, units = settings.holdout, _units(taken, grouped=settings.group is not None)
    count = len(units)
    if share == "auto":
        enough = len(taken) >= AUTO_HOLDOUT_ROWS and count * AUTO_HOLDOUT >= 1
        share = AUTO_HOLDOUT if enough else 0.0
    if share == 0:
        return set()
    wanted = max(1, round(share * count))
    if wanted >= count:
        kind = "different row(s)" if settings.group is None else f"value(s) of {settings.group!r}"
        raise DataError(
            f"domain {name!r} has {count} {kind}: a holdout of {share} leaves none to calibrate on",
            hint="give more rows or set the holdout to 0",
        )
    return {at for unit in rng.sample(range(count), wanted) for at in units[unit]}


def _units(taken: Sequence[_Taken], *, grouped: bool) -> list[list[int]]:
    """Return the rows that must not be split: those of a group, or equal ones.

    Equal rows in sequence also join their groups. Equal rows elsewhere do not: a licence in every
    document would join all of them.
    """
    keys = [row.group if grouped else row.tokens.numpy().tobytes() for row in taken]
    parents: dict[object, object] = {key: key for key in keys}

    def root(key: object) -> object:
        while parents[key] != key:
            key = parents[key]
        return key

    for at, (key, next_key) in enumerate(itertools.pairwise(keys)):
        if key != next_key and taken[at].tokens.equal(taken[at + 1].tokens):
            parents[root(next_key)] = root(key)
    units: dict[object, list[int]] = {}
    for at, key in enumerate(keys):
        units.setdefault(root(key), []).append(at)
    return list(units.values())
