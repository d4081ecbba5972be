"""Group token rows into padded batches. A batch has rows of one domain and one split only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moemerge.errors import DataError, UsageError
from moemerge.runtime.ranks import Ranks
from moemerge.text.domains import Domain

# Enough tokens to fill an accelerator's matrix units, few enough for one batch's temporaries.
DEFAULT_BATCH_TOKENS = 16384
# The same for any width: values in one hidden state of a batch. Kernels then run long enough that
# launching them costs nothing (65536 tokens of width 2048).
BATCH_VALUES = 2**27
# Bytes of GPU memory per value. A batch's temporaries take 50 to 100 of them, which leaves smaller
# cards memory for weights, router inputs and the solver.
MEMORY_PER_VALUE = 512
# Batches of a domain per process above which whole batches divide evenly enough.
BATCHES_FOR_EACH = 4


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one domain, padded on the right. Padding has token 0 and mask False."""

    domain: str
    holdout: bool
    input_ids: Tensor  # (rows, length), int64
    mask: Tensor  # (rows, length), bool: True for real tokens
    places: tuple[int, ...]  # each row's index in the domain's rows (or holdout rows)
    answers: Tensor | None = None  # (rows, length), bool: tokens whose loss counts; None: all

    @cached_property
    def tokens(self) -> int:
        return int(self.mask.sum())

    @cached_property
    def padded(self) -> bool:
        return not bool(self.mask.all())


def gpu_batch_tokens(width: int, memory: int) -> int:
    """Return the tokens per batch for a GPU of this size and a model of this width. GPUs of similar
    size get the same value, because the batch size decides the last bits of a result.
    """
    fitting = max(1, memory // MEMORY_PER_VALUE)
    return max(1, min(BATCH_VALUES, 1 << (fitting.bit_length() - 1)) // width)


def own_share(batches: Sequence[Batch], ranks: Ranks) -> tuple[Batch, ...]:
    """Return this rank's batches: some of every domain and split, with similar token counts."""
    if ranks.count == 1:
        return tuple(batches)
    groups = divided(batches, ranks.count)
    mine = ranks.share([[batch.tokens for batch in group] for group in groups])
    return tuple(
        group[place] for group, places in zip(groups, mine, strict=True) for place in places
    )


def divided(batches: Sequence[Batch], among: int) -> list[list[Batch]]:
    """Return the batches of every domain and split, at least one for each of `among` processes.

    If there are few, each batch is divided into parts of every n-th row: rows are sorted by length.
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
        else [
            rows_of(batch, slice(first, None, min(among, len(batch.places))))
            for batch in group
            for first in range(min(among, len(batch.places)))
        ]
        for group in groups.values()
    ]


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, with their padding."""
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        mask=batch.mask[rows],
        places=batch.places[rows],
        answers=None if batch.answers is None else batch.answers[rows],
    )


def make_batches(
    domains: Sequence[Domain], *, batch_tokens: int = DEFAULT_BATCH_TOKENS
) -> tuple[Batch, ...]:
    """Return batches of at most `batch_tokens` with padding; a longer row is a batch by itself.

    Rows are sorted by length, longest first. This needs little padding, and a batch that is too
    large for the memory fails at once.
    """
    if batch_tokens < 1:
        raise UsageError(f"batch_tokens is {batch_tokens}, expected at least 1")
    names = [domain.name for domain in domains]
    if len(set(names)) != len(names):
        raise DataError(f"domain names must differ, got {', '.join(names)}")
    batches: list[Batch] = []
    for domain in domains:
        for part in filter(None, (domain, domain.held_out)):
            for places in _split(part.rows, batch_tokens):
                rows = [part.rows[at] for at in places]
                ids = pad_sequence(rows, batch_first=True).long()
                lengths = torch.tensor([len(row) for row in rows])
                mask = torch.arange(ids.shape[1]) < lengths[:, None]
                own = None
                if part.answers:
                    answers = [part.answers[at] for at in places]
                    own = pad_sequence(answers, batch_first=True).bool()
                holdout = part is domain.held_out
                batches.append(Batch(domain.name, holdout, ids, mask, tuple(places), own))
    return tuple(batches)


def _split(rows: Sequence[Tensor], batch_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    # Stable sort: rows of equal length stay in the order of the file.
    for place in sorted(range(len(rows)), key=lambda at: -len(rows[at])):
        longest = len(rows[groups[-1][0]]) if groups else 0
        if groups and longest * (len(groups[-1]) + 1) <= batch_tokens:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups
