"""Sparsify task vectors that are too large for memory, a run of rows at a time.

What depends on the whole vector, a magnitude to cut at or its L1 norm, is found first by passes
over its runs. On a CPU the results are those of `_sparsify`, bit by bit: a run holds whole chunks,
so that sums are added in the same order. On a GPU, L1 norms differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.merging.methods._arithmetic import bits, chunk_size, chunks, magnitude
from moemerge.merging.methods._selection import Cut, drop_cut_, keep_cut_, kept_count
from moemerge.merging.methods._sparsify import RankedMask, Stream, keep_threshold
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_DIGIT_BITS = 16  # bits of a magnitude that one pass finds


@dataclass(frozen=True)
class Deltas:
    """One model's task vector, run by run, as often as it is needed."""

    shape: tuple[int, ...]  # of the whole unit
    dtype: torch.dtype
    runs: Callable[[], Iterator[Run]]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Run:
    """Some rows of a task vector, flat."""

    number: int
    start: int  # index of the first element
    values: Tensor


Change = Callable[[Run], None]  # zeroes elements in place


@dataclass(frozen=True)
class Thinning:
    """How one model's task vector is sparsified, and the scale of what is left."""

    change_: Change
    scale: float = 1.0


def trimming(deltas: Deltas, density: float, gamma: float, *, rescale: bool) -> Thinning:
    """Keep the largest magnitudes except for a fraction `gamma` of the very largest."""
    kept = kept_count(density, deltas.numel)
    outliers = min(int(gamma * deltas.numel), deltas.numel - kept)
    low = _cuts(deltas, kept + outliers) if kept + outliers < deltas.numel else None
    high = _cuts(deltas, outliers) if outliers else None

    def change_(run: Run) -> None:
        if kept + outliers == 0 or outliers == deltas.numel:
            run.values.zero_()
            return
        # Find the outliers' ties before others of their size are dropped.
        if low is not None:
            keep_cut_(run.values, low[run.number])
        if high is not None:
            drop_cut_(run.values, high[run.number])

    return _rescaled(deltas, change_, rescale=rescale)


def dropping(deltas: Deltas, density: float, seed: int, *, rescale: str | None) -> Thinning:
    """Keep each element with probability `density`."""
    if density >= 1:
        return Thinning(lambda run: None)
    threshold = keep_threshold(density)

    def change_(run: Run) -> None:
        values = run.values
        stream = Stream(seed, min(values.numel(), chunk_size(values.device)), values.device)
        for at in chunks(values):
            stream.thin_(values[at], run.start + at.start, threshold)

    if rescale == "probability" and density > 0:
        return Thinning(change_, 1 / density)
    return _rescaled(deltas, change_, rescale=rescale == "l1")


def ranked_dropping(
    deltas: Deltas, density: float, epsilon: float, seed: int, *, rescale: str | None
) -> Thinning:
    """Keep each element with a probability that grows with its magnitude's rank in its row."""
    if density >= 1:
        return Thinning(lambda run: None)
    columns = deltas.numel // deltas.shape[0]
    mask = RankedMask(columns, density, epsilon, seed, inverse=rescale == "probability")

    def change_(run: Run) -> None:
        mask.apply_(run.values.view(-1, columns), run.start // columns)

    return _rescaled(deltas, change_, rescale=rescale == "l1")


def _rescaled(deltas: Deltas, change_: Change, *, rescale: bool) -> Thinning:
    """Return the thinning with the scale that restores the L1 norm."""
    if not rescale:
        return Thinning(change_)
    before = after = 0.0
    for run in deltas.runs():
        for at in chunks(run.values):
            before += magnitude(run.values[at])
        change_(run)
        for at in chunks(run.values):
            after += magnitude(run.values[at])
    return Thinning(change_, before / after if after > 0 else 1.0)


def _cuts(deltas: Deltas, k: int) -> list[Cut]:
    """Return the cut below the `k` largest magnitudes of all runs, for each run; k > 0.

    The bits of non-negative floats have the order of the floats. Each pass finds some of the cut's
    bits, the highest first, by counting.
    """
    cut, left = 0, 8 * deltas.dtype.itemsize - 1
    while True:
        width = min(left, _DIGIT_BITS)
        left -= width
        counts = torch.stack([_count(run.values, cut, left, width) for run in deltas.runs()])
        from_top = counts.sum(0).flip(0).cumsum(0)
        place = int(torch.searchsorted(from_top, k))
        k -= int(from_top[place - 1]) if place else 0
        digit = 2**width - 1 - place
        cut = cut << width | digit
        if left == 0:
            break
    size = float(bits(torch.empty(1, dtype=deltas.dtype)).fill_(cut).view(deltas.dtype))
    cuts = []
    for ties in counts[:, digit].tolist():  # lower indices are kept first
        here = min(ties, k)
        k -= here
        cuts.append(Cut(size, here, ties - here))
    return cuts


def _count(values: Tensor, cut: int, left: int, width: int) -> Tensor:
    """Count each value of the next `width` bits of the elements whose first bits are `cut`."""
    is_first = left + width == 8 * values.dtype.itemsize - 1
    counts = torch.zeros(2**width, dtype=torch.int64, device=values.device)
    for at in chunks(values):
        code = bits(values[at].abs()) >> left
        if not is_first:
            code = code[code >> width == cut] & (2**width - 1)
        counts += torch.bincount(code, minlength=2**width)
    return counts.cpu()
