"""Token rows -> padded batches. A batch holds rows of one domain and of one split only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moemerge.errors import DataError, UsageError
from moemerge.runtime import ranks
from moemerge.text.domains import Domain

# Enough tokens to fill an accelerator's matrix units, few enough for one batch's temporaries.
DEFAULT_BATCH_TOKENS = 16384
# The same of a model's width: values in one hidden state of a batch. Kernels are long enough then
# that starting them costs nothing (65536 tokens of width 2048).
BATCH_VALUES = 2**27
# Of a GPU's memory for each value. A batch's temporaries take 50 to 100 bytes of them, so smaller
# cards keep the room that weights, router inputs and the solver need.
MEMORY_PER_VALUE = 512
PaddingSide = Literal["right", "left"]
# Batches of a domain for each process, from which on whole ones are dealt out evenly enough.
BATCHES_FOR_EACH = 4


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one domain, padded to the longest. Padded places hold token `pad` and mask False."""

    domain: str
    holdout: bool
    input_ids: Tensor  # (rows, length), int64
    mask: Tensor  # (rows, length), bool: True where a real token is
    places: tuple[int, ...]  # each row's place in the domain's rows (or holdout rows)

    @cached_property
    def tokens(self) -> int:
        return int(self.mask.sum())

    @cached_property
    def padded(self) -> bool:
        return not bool(self.mask.all())


def gpu_batch_tokens(width: int, memory: int) -> int:
    """Tokens of a batch on a GPU with so many bytes, for a model of this width. Cards of about the
    same size get the same: batches decide the last bits of a result."""
    fitting = max(1, memory // MEMORY_PER_VALUE)
    return max(1, min(BATCH_VALUES, 1 << (fitting.bit_length() - 1)) // width)


def own_share(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Those of this rank: some of every domain and split, with about as many tokens as others."""
    if ranks.count() == 1:
        return tuple(batches)
    groups = divided(batches, ranks.count())
    mine = ranks.share([[batch.tokens for batch in group] for group in groups])
    return tuple(
        group[place] for group, places in zip(groups, mine, strict=True) for place in places
    )


def divided(batches: Sequence[Batch], among: int) -> list[list[Batch]]:
    """The batches of every domain and split, at least one for each of `among` processes.

    Where there are few, each gives every process its share of rows, long and short ones.
    """
    groups: dict[tuple[str, bool], list[Batch]] = {}
    for batch in batches:
        groups.setdefault((batch.domain, batch.holdout), []).append(batch)
    for (domain, holdout), group in groups.items():
        rows = sum(len(batch.places) for batch in group)
        if rows < among:
            kind = "rows held out" if holdout else "rows"
            raise DataError(
                f"domain {domain!r} has {rows} {kind} for {among} processes",
                hint="start fewer processes, or give more text",
            )
    return [
        group
        if len(group) >= BATCHES_FOR_EACH * among
        else [rows_of(batch, part) for batch in group for part in _parts(batch, among)]
        for group in groups.values()
    ]


def _parts(batch: Batch, count: int) -> list[slice]:
    """Every so many-th row: rows are sorted by length, so the parts are alike."""
    count = min(count, len(batch.places))
    return [slice(first, None, count) for first in range(count)]


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some of a batch's rows, padded as they were."""
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        mask=batch.mask[rows],
        places=batch.places[rows],
    )


def make_batches(
    domains: Sequence[Domain],
    *,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    pad: int = 0,
    side: PaddingSide = "right",
) -> tuple[Batch, ...]:
    """Batches whose padded size stays within `batch_tokens` (a longer row is a batch of its own).

    Rows are sorted by length, longest first, so that little is padded and a batch that is too
    large for the memory is met at once, not at the end.
    """
    if batch_tokens < 1:
        raise UsageError(f"batch_tokens is {batch_tokens}, expected at least 1")
    names = [domain.name for domain in domains]
    if len(set(names)) != len(names):
        raise DataError(f"domain names must differ, got {', '.join(names)}")
    batches: list[Batch] = []
    for domain in domains:
        for rows, holdout in ((domain.rows, False), (domain.holdout, True)):
            for places in _split(rows, batch_tokens):
                batches.append(_pad(domain.name, holdout, rows, places, pad, side))
    return tuple(batches)


def _split(rows: Sequence[Tensor], batch_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    # Stable sort: equal lengths stay in the order of the file.
    for place in sorted(range(len(rows)), key=lambda at: -len(rows[at])):
        longest = len(rows[groups[-1][0]]) if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _pad(
    domain: str,
    holdout: bool,
    rows: Sequence[Tensor],
    places: Sequence[int],
    pad: int,
    side: PaddingSide,
) -> Batch:
    own = [rows[place] for place in places]
    lengths = torch.tensor([len(row) for row in own])[:, None]
    input_ids = pad_sequence(own, batch_first=True, padding_value=pad, padding_side=side).long()
    columns = torch.arange(input_ids.shape[1])
    if side == "left":
        columns = columns.flip(0)
    mask = columns < lengths
    return Batch(domain, holdout, input_ids, mask, tuple(places))
