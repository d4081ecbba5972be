"""Sparsify a task vector in place and rescale it, and the random masks to do so.

A random mask depends on a seed and the element's index alone. It hashes the index instead of using
a generator with state, so order, chunks, threads and device do not change a bit. One 32-bit word
serves two neighbouring elements with 16 bits each. Probabilities are exact to 2^-15, far below the
sampling noise of a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moemerge.merging.methods._arithmetic import (
    bits,
    chunk_size,
    chunks,
    magnitude,
    total_magnitude,
)
from moemerge.merging.methods._selection import (
    ascending_order,
    drop_largest_,
    keep_largest_,
    kept_count,
)
from moemerge.merging.methods._task_vectors import TaskVector
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


def trim_(vector: TaskVector, density: float, *, rescale: bool) -> None:
    """Keep the largest magnitudes (TIES)."""
    before = total_magnitude(vector.values) if rescale else 0.0
    keep_largest_(vector.values, kept_count(density, vector.values.numel()))
    _rescale(vector, before, rescale=rescale)


def trim_both_ends_(vector: TaskVector, density: float, gamma: float, *, rescale: bool) -> None:
    """Drop the fraction `gamma` of largest magnitudes, then keep the largest of the rest.

    If density + gamma exceeds one, fewer of the largest are dropped: density has precedence.
    """
    n = vector.values.numel()
    kept = kept_count(density, n)
    outliers = min(int(gamma * n), n - kept)
    before = total_magnitude(vector.values) if rescale else 0.0
    # Drop the outliers last, so that both cuts rank the same values.
    keep_largest_(vector.values, kept + outliers)
    drop_largest_(vector.values, outliers)
    _rescale(vector, before, rescale=rescale)


def drop_randomly_(vector: TaskVector, density: float, seed: int, *, rescale: str | None) -> None:
    """Keep each element with probability `density` (DARE).

    `rescale`: "l1" restores the L1 norm, "probability" divides by the density.
    """
    values = vector.values
    if density >= 1 or values.numel() == 0:
        return
    stream = Stream(seed, min(values.numel(), chunk_size(values.device)), values.device)
    threshold = keep_threshold(density)
    before = after = 0.0
    for at in chunks(values):  # sum the magnitudes while the chunk is in cache
        chunk = values[at]
        before += magnitude(chunk) if rescale == "l1" else 0.0
        stream.thin_(chunk, at.start, threshold)
        after += magnitude(chunk) if rescale == "l1" else 0.0
    if after > 0:
        vector.scale *= before / after
    if rescale == "probability" and density > 0:
        vector.scale /= density


def drop_by_rank_(
    vector: TaskVector,
    rows: int,
    density: float,
    epsilon: float,
    seed: int,
    *,
    rescale: str | None,
) -> None:
    """Keep each element with a probability that grows with its magnitude's rank in its row (DELLA).

    It rises from density - epsilon for the smallest to density + epsilon for the largest.
    `rescale`: "l1" restores the L1 norm, "probability" divides each element by its probability.
    """
    values = vector.values
    if density >= 1 or values.numel() == 0:
        return
    before = total_magnitude(values) if rescale == "l1" else 0.0
    matrix = values.view(rows, -1)
    inverse = rescale == "probability"
    RankedMask(matrix.shape[1], density, epsilon, seed, inverse=inverse).apply_(matrix, 0)
    _rescale(vector, before, rescale=rescale == "l1")


def _keep_probabilities(n: int, density: float, epsilon: float) -> list[float]:
    """Return the probabilities by ascending rank; the density itself for a row of one element."""
    if n == 1:
        return [density]
    low = density - epsilon
    return [min(1.0, max(0.0, low + 2 * epsilon * r / (n - 1))) for r in range(n)]


class RankedMask:
    """DELLA's random mask. Thresholds, gains and draws are ordered by ascending magnitude."""

    def __init__(
        self, columns: int, density: float, epsilon: float, seed: int, *, inverse: bool
    ) -> None:
        ramp = _keep_probabilities(columns, density, epsilon)
        self._seed = seed
        self._thresholds = [keep_threshold(p) for p in ramp]
        self._gains = [1 / p if p > 0 else 0.0 for p in ramp] if inverse else [1.0] * columns

    def apply_(self, matrix: Tensor, row: int) -> None:
        """Multiply kept elements by their gains and all others by zero, in place.

        `row` is the number of the matrix's first row.
        """
        device, columns = matrix.device, matrix.shape[1]
        thresholds = torch.tensor(self._thresholds, dtype=torch.int16).to(device)
        gains = torch.tensor(self._gains, dtype=matrix.dtype).to(device)
        step = max(1, chunk_size(device) // columns)
        stream = Stream(self._seed, min(step, matrix.shape[0]) * columns, device)
        for first in range(0, matrix.shape[0], step):
            chunk = matrix[first : first + step]
            keep = stream.keep((row + first) * columns, chunk.numel(), thresholds).view_as(chunk)
            ranked = gains.repeat(len(chunk), 1)  # a copy, also of one row
            bits(ranked).bitwise_and_(keep.to(bits(ranked).dtype))
            chunk.mul_(torch.empty_like(chunk).scatter_(1, ascending_order(chunk), ranked))


def _rescale(vector: TaskVector, before: float, *, rescale: bool) -> None:
    """Adjust the scale to restore the L1 norm `before`."""
    after = total_magnitude(vector.values) if rescale else 0.0
    if after > 0:
        vector.scale *= before / after


_WORDS = 1 << 32
_WEYL = 0x9E3779B9  # 2^32 / golden ratio: spreads neighbouring indices
# Multipliers and shifts of the finaliser "lowbias32" (Wellons, hash-prospector).
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SHIFTS = (16, 15, 16)
_RESOLUTION = 15  # bits of a draw that are compared with a probability


def keep_threshold(probability: float) -> int:
    """Return t such that `draw >> 1 < t` holds with `probability`; exact for 0 and 1."""
    return round(probability * (1 << _RESOLUTION)) - (1 << (_RESOLUTION - 1))


class Stream:
    """An endless sequence of independent 16-bit numbers, addressed by element index."""

    def __init__(self, seed: int, capacity: int, device: torch.device) -> None:
        self._seed = seed
        words = capacity // 2 + 1  # one more for an odd start
        counter = torch.arange(words, dtype=torch.int32, device=device)
        self._weyl = counter.mul_(_signed(_WEYL))
        self._words = torch.empty_like(counter)
        self._shifted = torch.empty_like(counter)

    def draw(self, start: int, count: int) -> Tensor:
        """Return numbers `start` to `start + count` as int16. The next call overwrites them."""
        first, stop = start // 2, (start + count + 1) // 2
        here = min(stop - first, _WORDS - first % _WORDS)
        self._fill(first, slice(0, here))
        if here < stop - first:
            self._fill(first + here, slice(here, stop - first))
        return self._words.view(torch.int16)[start % 2 : start % 2 + count]

    def keep(self, start: int, count: int, threshold: int | Tensor) -> Tensor:
        """Return -1 (all bits set) for kept elements, else 0, as int16; see `keep_threshold`."""
        drawn = self.draw(start, count)
        drawn.bitwise_right_shift_(1)  # so that the difference cannot overflow
        if isinstance(threshold, torch.Tensor):
            drawn.view(-1, threshold.numel()).sub_(threshold)
        else:
            drawn.sub_(threshold)
        return drawn.bitwise_right_shift_(_RESOLUTION)

    def thin_(self, values: Tensor, start: int, threshold: int) -> None:
        """Zero the dropped elements of a flat chunk whose first element has index `start`."""
        kept = bits(values)
        kept.bitwise_and_(self.keep(start, values.numel(), threshold).to(kept.dtype))

    def _fill(self, first: int, where: slice) -> None:
        """Hash the words from index `first` on; all are in one range of 2^32."""
        key = _mix64(self._seed + (first // _WORDS) * 0xD1342543DE82EF95)
        words, shifted = self._words[where], self._shifted[where]
        torch.add(self._weyl[: words.numel()], _signed(first * _WEYL + key), out=words)
        # Both halves of the key are used: with the first alone, two streams would be shifted
        # copies of one sequence.
        if words.device.type == "cpu":
            _finalise_numpy(_unsigned(words), _unsigned(shifted), key >> 32)
        else:
            finalise_torch(words, shifted, key >> 32)


def _finalise_numpy(h: npt.NDArray[Any], shifted: npt.NDArray[Any], addend: int) -> None:
    """Hash in numpy, which has unsigned shifts and a third of torch's overhead on small chunks."""
    for round_, shift in enumerate(_SHIFTS):
        np.right_shift(h, np.uint32(shift), out=shifted)
        np.bitwise_xor(h, shifted, out=h)
        if round_ < len(_MULTIPLIERS):
            np.multiply(h, np.uint32(_MULTIPLIERS[round_]), out=h)
        if round_ == 0:
            np.add(h, np.uint32(addend), out=h)


def finalise_torch(h: Tensor, shifted: Tensor, addend: int) -> None:
    """Compute the same bits on any device; torch has signed shifts, so mask the sign."""
    for round_, shift in enumerate(_SHIFTS):
        torch.bitwise_right_shift(h, shift, out=shifted)
        h.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
        if round_ < len(_MULTIPLIERS):
            h.mul_(_signed(_MULTIPLIERS[round_]))
        if round_ == 0:
            h.add_(_signed(addend))


def _unsigned(words: Tensor) -> npt.NDArray[Any]:
    return words.numpy().view(np.uint32)


def _signed(word: int) -> int:
    """Return the int32 with the low 32 bits of `word`."""
    word %= _WORDS
    return word - _WORDS if word >= _WORDS // 2 else word


def _mix64(x: int) -> int:
    """Return splitmix64's finaliser: every bit of a seed changes half of the key."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
