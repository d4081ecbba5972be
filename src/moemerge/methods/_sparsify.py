"""Which elements of a task vector are kept: the largest, or random ones.

A sparsifier is a function `(vector, **parameters) -> Keep`. It may read the whole task vector, to
find a magnitude to cut at. `Keep` then zeroes the dropped elements of any of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.methods._tensors import rows_and_columns
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    from torch import Tensor

Keep = Callable[["Tensor", int], None]  # (rows, index of the first one); changes the rows in place


@dataclass(frozen=True)
class TaskVector:
    """One model's task vector as a matrix, some rows at a time and as often as needed."""

    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]  # (rows, columns), from the first row on
    seed: Callable[[str], int]  # of this unit and model

    @property
    def numel(self) -> int:
        rows, columns = rows_and_columns(self.shape)
        return rows * columns

    @property
    def columns(self) -> int:
        return rows_and_columns(self.shape)[1]

    def largest(self, count: int) -> Largest:
        """Return the `count` elements of largest magnitude; lower indices first if they tie."""
        if not 0 < count < self.numel:
            return Largest(-1.0 if count else float("inf"), self.numel)
        # The bits of non-negative floats have the order of the floats, and numpy selects integers
        # fastest. Many equal elements are slow, and only zeros are likely to be that many.
        nonzero = [bits[bits > 0] for bits in (_bits(block.abs()) for block in self.blocks())]
        found = np.concatenate(nonzero)
        if count > found.size:
            return Largest(-1.0, self.numel)  # the others are zero already
        place = found.size - count
        found.partition(place)
        cut = found[place]
        missing = count - int(np.count_nonzero(found[place:] > cut))
        magnitude = float(cut.view(f"f{cut.itemsize}"))
        if missing == np.count_nonzero(found == cut):
            return Largest(magnitude, self.numel)
        start = 0
        for block in self.blocks():
            ties = np.flatnonzero(_bits(block.abs()) == cut)
            if len(ties) >= missing:
                return Largest(magnitude, start + int(ties[missing - 1]) + 1)
            missing -= len(ties)
            start += block.numel()
        raise AssertionError("the task vector has changed")


@dataclass(frozen=True)
class Largest:
    """The elements above a magnitude, and those equal to it before an index."""

    magnitude: float
    stop: int  # flat index

    def keep(self, rows: Tensor, first: int) -> None:
        """Zero all other elements of some rows."""
        for part, limit in self._parts(rows, first):
            torch.hardshrink(part, limit, out=part)

    def drop(self, rows: Tensor, first: int) -> None:
        """Zero these elements of some rows."""
        for part, limit in self._parts(rows, first):
            part.masked_fill_(part.abs() > limit, 0.0)

    def _parts(self, rows: Tensor, first: int) -> Iterator[tuple[Tensor, float]]:
        """Yield parts of the rows, each with the magnitude that its elements have to exceed."""
        flat, start = rows.view(-1), first * rows.shape[1]
        split = min(max(self.stop - start, 0), flat.numel())
        limit = flat.new_tensor(self.magnitude)
        below = torch.nextafter(limit, torch.full_like(limit, -float("inf")))
        yield flat[:split], float(below)
        yield flat[split:], self.magnitude


def _bits(magnitudes: Tensor) -> np.typing.NDArray[np.integer]:
    values = magnitudes.reshape(-1).cpu().numpy()
    return values.view(f"i{values.itemsize}")


def kept_count(density: float, n: int) -> int:
    """Return how many of `n` elements a density keeps: int(density·n), but at least one.

    A norm of a few elements would otherwise lose its whole update to rounding.
    """
    return 0 if density <= 0 else min(n, max(1, int(density * n)))


def keep_largest(values: Tensor, count: int) -> Tensor:
    """Return a copy of a tensor with all but its `count` largest magnitudes zeroed."""
    kept = values.reshape(1, -1).clone()
    TaskVector(kept.shape, lambda: iter([kept]), lambda salt: 0).largest(count).keep(kept, 0)
    return kept.view(values.shape)


def ordered_at(values: Tensor, places: Sequence[int]) -> list[float]:
    """Return the elements at these positions of all elements in ascending order."""
    ordered = np.partition(values.reshape(-1).cpu().numpy(), sorted(set(places)))
    return [float(ordered[place]) for place in places]


# --- random masks ---------------------------------------------------------------------------------
#
# A draw hashes the seed and the element's index, so order, blocks, threads and device do not change
# it. One 32-bit word serves two neighbouring elements with 16 bits each. Probabilities are exact to
# 2^-15, far below the sampling noise of a tensor.

_WEYL = 0x9E3779B9  # 2^32 / golden ratio: spreads neighbouring indices
# Multipliers and shifts of the finaliser "lowbias32" (Wellons, hash-prospector).
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SHIFTS = (16, 15, 16)
_RESOLUTION = 15  # bits of a draw that are compared with a probability


def keep_threshold(probability: float) -> int:
    """Return t such that `draw >> 1 < t` holds with `probability`; exact for 0 and 1."""
    return round(probability * (1 << _RESOLUTION)) - (1 << (_RESOLUTION - 1))


def random_keep(seed: int, rows: Tensor, first: int, thresholds: int | Tensor) -> Tensor:
    """Return which elements of some rows to keep, by `keep_threshold` of each or of each column."""
    start = first * rows.shape[1]
    drawn = draw(seed, start, rows.numel(), rows.device).view(rows.shape)
    return (drawn >> 1) < thresholds


def draw(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """Return the independent int16 numbers of the elements from index `start` on."""
    first = start // 2
    words = torch.arange((start + count + 1) // 2 - first, dtype=torch.int32, device=device)
    key = _mix64(seed)
    words.mul_(_signed(_WEYL)).add_(_signed(first * _WEYL + key))
    # Both halves of the key are used: with the first alone, two streams would be shifted copies of
    # one sequence.
    return _finalise(words, key >> 32).view(torch.int16)[start % 2 : start % 2 + count]


def _finalise(h: Tensor, addend: int) -> Tensor:
    """Hash in place. torch has signed shifts, so mask the sign."""
    for step, shift in enumerate(_SHIFTS):
        h ^= (h >> shift) & ((1 << (32 - shift)) - 1)
        if step < len(_MULTIPLIERS):
            h *= _signed(_MULTIPLIERS[step])
        if step == 0:
            h += _signed(addend)
    return h


def _signed(word: int) -> int:
    """Return the int32 with the low 32 bits of `word`."""
    word %= 1 << 32
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix64(x: int) -> int:
    """Return splitmix64's finaliser: every bit of a seed changes half of the key."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
