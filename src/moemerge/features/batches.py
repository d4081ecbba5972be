"""Token rows -> padded batches. A batch holds rows of one domain and of one split only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moemerge.errors import DataError, UsageError
from moemerge.features.text import Domain

# Enough tokens to fill an accelerator's matrix units, few enough for one batch's temporaries.
DEFAULT_BATCH_TOKENS = 16384
PaddingSide = Literal["right", "left"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one domain, padded to the longest. Padded places hold token `pad` and mask False."""

    domain: str
    holdout: bool
    input_ids: Tensor  # (rows, length), int64
    mask: Tensor  # (rows, length), bool: True where a real token is
    places: tuple[int, ...]  # each row's place in the domain's rows (or holdout rows)

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def padded(self) -> bool:
        return not bool(self.mask.all())


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
    length = max(len(rows[place]) for place in places)
    input_ids = torch.full((len(places), length), pad, dtype=torch.int64)
    mask = torch.zeros((len(places), length), dtype=torch.bool)
    for at, place in enumerate(places):
        row = rows[place]
        span = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        input_ids[at, span] = row
        mask[at, span] = True
    return Batch(domain, holdout, input_ids, mask, tuple(places))
