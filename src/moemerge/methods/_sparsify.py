"""Sparsify a task vector in place and rescale it, and the random masks to do so.

A vector that is too large for memory comes in runs of rows. What depends on the whole vector, a
magnitude to cut at or its L1 norm, is found first by passes over its runs. On a CPU the results are
those of the whole vector, bit by bit: a run holds whole chunks, so that sums are added in the same
order. On a GPU, L1 norms differ by rounding.

A random mask depends on a seed and the element's index alone. It hashes the index instead of using
a generator with state, so order, chunks, threads and device do not change a bit. One 32-bit word
serves two neighbouring elements with 16 bits each. Probabilities are exact to 2^-15, far below the
sampling noise of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moemerge.methods._arithmetic import bits, chunk_size, chunks, magnitude
from moemerge.methods._selection import (
    Cut,
    ascending_order,
    drop_cut_,
    keep_cut_,
    kept_count,
    magnitude_cut,
)
from moemerge.methods._task_vectors import TaskVector, task_vector
from moemerge.methods.method import ModelTensor, UnitInfo
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_DIGIT_BITS = 16  # bits of a magnitude that one pass over the runs finds


@dataclass(frozen=True)
class Run:
    """Some rows of a task vector, flat."""

    number: int
    start: int  # index of the first element
    values: Tensor


@dataclass(frozen=True)
class Deltas:
    """One model's task vector, run by run, as often as it is needed."""

    shape: tuple[int, ...]  # of the whole unit
    dtype: torch.dtype
    runs: Callable[[], Iterator[Run]]
    whole: Tensor | None = None  # the values, if the only run is the whole vector

    @classmethod
    def of(cls, values: Tensor, shape: tuple[int, ...]) -> Deltas:
        """Return the flat task vector of a unit of this shape as a single run."""
        return cls(shape, values.dtype, lambda: iter([Run(0, 0, values)]), values)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Change = Callable[[Run], None]  # zeroes elements in place


@dataclass(frozen=True)
class Thinning:
    """How one model's task vector is sparsified, and the scale of what is left."""

    change_: Change
    scale: float = 1.0
    restores_norm: bool = False  # the scale is the one that restores the L1 norm

    def apply_(self, runs: Iterable[Run]) -> float:
        """Sparsify all runs in place and return the scale."""
        before = after = 0.0
        for run in runs:
            if not self.restores_norm:
                self.change_(run)
                continue
            for at in chunks(run.values):  # added chunk by chunk, as in a single run
                before += magnitude(run.values[at])
            self.change_(run)
            for at in chunks(run.values):
                after += magnitude(run.values[at])
        return before / after if after > 0 else self.scale


@dataclass(frozen=True)
class Sparsified:
    """A merge of sparsified task vectors, whole or in runs.

    `thin` (task vector, parameters, options, model's position, unit) decides what is dropped.
    `add` (inputs, base, sparsified vectors, options) merges the rest.
    """

    thin: Callable[[Deltas, Any, Any, int, UnitInfo], Thinning]
    add: Callable[[Sequence[ModelTensor], Tensor, Sequence[TaskVector], Any], Tensor]

    def whole(
        self, inputs: Sequence[ModelTensor], base: Tensor, options: object, unit: UnitInfo
    ) -> Tensor:
        """Merge a unit whose task vectors fit into memory."""
        vectors = [task_vector(i, base) for i in inputs]
        for position, (vector, model) in enumerate(zip(vectors, inputs, strict=True)):
            deltas = Deltas.of(vector.values, base.shape)
            thinning = self.thin(deltas, model.params, options, position, unit)
            vector.scale = thinning.apply_(deltas.runs())
        return self.add(inputs, base, vectors, options)

    def survey(
        self, deltas: Deltas, params: object, options: object, position: int, unit: UnitInfo
    ) -> Thinning:
        """Return how the runs of one model's task vector are sparsified, and their scale."""
        thinning = self.thin(deltas, params, options, position, unit)
        if thinning.restores_norm:
            thinning = replace(thinning, scale=thinning.apply_(deltas.runs()), restores_norm=False)
        return thinning

    def run(
        self,
        inputs: Sequence[ModelTensor],
        base: Tensor,
        options: object,
        surveys: Sequence[Thinning],
        number: int,
        start: int,
    ) -> Tensor:
        """Merge a run of rows whose first element has the index `start`."""
        vectors = [task_vector(i, base) for i in inputs]
        for vector, thinning in zip(vectors, surveys, strict=True):
            vector.scale = thinning.apply_([Run(number, start, vector.values)])
        return self.add(inputs, base, vectors, options)


def trimming(deltas: Deltas, density: float, gamma: float, *, rescale: bool) -> Thinning:
    """Drop the fraction `gamma` of largest magnitudes, then keep the largest of the rest.

    If density + gamma exceeds one, fewer of the largest are dropped: density has precedence.
    """
    kept = kept_count(density, deltas.numel)
    outliers = min(int(gamma * deltas.numel), deltas.numel - kept)
    low = _cuts(deltas, kept + outliers) if 0 < kept + outliers < deltas.numel else None
    high = _cuts(deltas, outliers) if outliers else None

    def change_(run: Run) -> None:
        if kept + outliers == 0 or outliers == deltas.numel:
            run.values.zero_()
            return
        # Drop the outliers last, so that both cuts rank the same values.
        if low is not None:
            keep_cut_(run.values, low[run.number])
        if high is not None:
            drop_cut_(run.values, high[run.number])

    return Thinning(change_, restores_norm=rescale)


def dropping(deltas: Deltas, density: float, seed: int, *, rescale: str | None) -> Thinning:
    """Keep each element with probability `density` (DARE).

    `rescale`: "l1" restores the L1 norm, "probability" divides by the density.
    """
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
    return Thinning(change_, restores_norm=rescale == "l1")


def ranked_dropping(
    deltas: Deltas, density: float, epsilon: float, seed: int, *, rescale: str | None
) -> Thinning:
    """Keep each element with a probability that grows with its magnitude's rank in its row (DELLA).

    It rises from density - epsilon for the smallest to density + epsilon for the largest.
    `rescale`: "l1" restores the L1 norm, "probability" divides each element by its probability.
    """
    if density >= 1 or deltas.numel == 0:
        return Thinning(lambda run: None)
    columns = deltas.numel // (deltas.shape[0] if len(deltas.shape) > 1 else 1)
    ramp = _keep_probabilities(columns, density, epsilon)  # by ascending magnitude
    thresholds = torch.tensor([keep_threshold(p) for p in ramp], dtype=torch.int16)
    inverse = rescale == "probability"
    gains = [1 / p if p > 0 else 0.0 for p in ramp] if inverse else [1.0] * columns

    def change_(run: Run) -> None:
        matrix, device = run.values.view(-1, columns), run.values.device
        limits, ranked_gains = thresholds.to(device), matrix.new_tensor(gains)
        step = max(1, chunk_size(device) // columns)
        stream = Stream(seed, min(step, len(matrix)) * columns, device)
        for first in range(0, len(matrix), step):
            chunk = matrix[first : first + step]
            keep = stream.keep(run.start + first * columns, chunk.numel(), limits).view_as(chunk)
            ranked = ranked_gains.repeat(len(chunk), 1)  # a copy, also of one row
            bits(ranked).bitwise_and_(keep.to(bits(ranked).dtype))
            chunk.mul_(torch.empty_like(chunk).scatter_(1, ascending_order(chunk), ranked))

    return Thinning(change_, restores_norm=rescale == "l1")


def _cuts(deltas: Deltas, k: int) -> list[Cut]:
    """Return the cut below the `k` largest magnitudes of all runs, for each run; k > 0.

    The bits of non-negative floats have the order of the floats. Each pass finds some of the cut's
    bits, the highest first, by counting.
    """
    if deltas.whole is not None:
        return [magnitude_cut(deltas.whole, k)]
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
        cuts.append(Cut(size, here))
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


def _keep_probabilities(n: int, density: float, epsilon: float) -> list[float]:
    """Return the probabilities by ascending rank; the density itself for a row of one element."""
    if n == 1:
        return [density]
    low = density - epsilon
    return [min(1.0, max(0.0, low + 2 * epsilon * r / (n - 1))) for r in range(n)]


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
        _finalise(words, shifted, key >> 32)


def _finalise(h: Tensor, shifted: Tensor, addend: int) -> None:
    """Hash in place. torch has signed shifts, so mask the sign."""
    for round_, shift in enumerate(_SHIFTS):
        torch.bitwise_right_shift(h, shift, out=shifted)
        h.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
        if round_ < len(_MULTIPLIERS):
            h.mul_(_signed(_MULTIPLIERS[round_]))
        if round_ == 0:
            h.add_(_signed(addend))


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
