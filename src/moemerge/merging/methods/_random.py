"""Random masks that depend on a stream's number and an element's index alone.

A hash of the index takes the place of a generator with state, so the order of work, its split
into chunks, the number of threads and the device cannot change a single bit. One 32-bit word serves
two neighbouring elements with 16 bits each: a probability is met to 2^-15, far below what a
tensor's sampling noise could show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moemerge.merging.methods._arithmetic import bits
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor


_WORD = 1 << 32
_WEYL = 0x9E3779B9  # 2^32 / golden ratio: neighbouring indexes land far apart
# Multipliers and shifts of the finaliser "lowbias32" (Wellons, hash-prospector).
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SHIFTS = (16, 15, 16)
_RESOLUTION = 15  # bits of a draw that a probability is compared with


def keep_threshold(probability: float) -> int:
    """The integer t for which `draw >> 1 < t` holds with `probability`; 0 and 1 are exact."""
    return round(probability * (1 << _RESOLUTION)) - (1 << (_RESOLUTION - 1))


class Stream:
    """An endless row of independent 16-bit numbers, numbered by element index."""

    def __init__(self, seed: int, capacity: int, device: torch.device) -> None:
        self._seed = seed
        words = capacity // 2 + 1  # an odd start takes one more
        counter = torch.arange(words, dtype=torch.int32, device=device)
        self._weyl = counter.mul_(_signed(_WEYL))
        self._words = torch.empty_like(counter)
        self._shifted = torch.empty_like(counter)

    def draw(self, start: int, count: int) -> Tensor:
        """Numbers `start` to `start + count` as int16.

        The buffer belongs to the stream: the next call overwrites it.
        """
        first, stop = start // 2, (start + count + 1) // 2
        here = min(stop - first, _WORD - first % _WORD)
        self._fill(first, slice(0, here))
        if here < stop - first:
            self._fill(first + here, slice(here, stop - first))
        return self._words.view(torch.int16)[start % 2 : start % 2 + count]

    def keep(self, start: int, count: int, threshold: int | Tensor) -> Tensor:
        """-1 (all bits set) where an element is kept, else 0, as int16; see `keep_threshold`."""
        drawn = self.draw(start, count)
        drawn.bitwise_right_shift_(1)  # so that the difference cannot overflow
        if isinstance(threshold, torch.Tensor):
            drawn.view(-1, threshold.numel()).sub_(threshold)
        else:
            drawn.sub_(threshold)
        return drawn.bitwise_right_shift_(_RESOLUTION)

    def thin_(self, values: Tensor, start: int, threshold: int) -> None:
        """Zero in place what is not kept of a flat chunk whose first element has index `start`."""
        kept = bits(values)
        kept.bitwise_and_(self.keep(start, values.numel(), threshold).to(kept.dtype))

    def _fill(self, first: int, where: slice) -> None:
        """Hash the words from number `first` on; all of them lie in one range of 2^32."""
        key = _mix64(self._seed + (first // _WORD) * 0xD1342543DE82EF95)
        words, shifted = self._words[where], self._shifted[where]
        torch.add(self._weyl[: words.numel()], _signed(first * _WEYL + key), out=words)
        # The key enters twice: by its first half alone, two streams would be the same row of
        # numbers, shifted.
        if words.device.type == "cpu":
            _finalise_numpy(_unsigned(words), _unsigned(shifted), key >> 32)
        else:
            finalise_torch(words, shifted, key >> 32)


def _finalise_numpy(h: npt.NDArray[Any], shifted: npt.NDArray[Any], addend: int) -> None:
    """numpy has unsigned shifts, and calls that cost a third of torch's on small chunks."""
    for round_, shift in enumerate(_SHIFTS):
        np.right_shift(h, np.uint32(shift), out=shifted)
        np.bitwise_xor(h, shifted, out=h)
        if round_ < len(_MULTIPLIERS):
            np.multiply(h, np.uint32(_MULTIPLIERS[round_]), out=h)
        if round_ == 0:
            np.add(h, np.uint32(addend), out=h)


def finalise_torch(h: Tensor, shifted: Tensor, addend: int) -> None:
    """The same bits on any device; torch shifts signed integers, so the sign is masked away."""
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
    """The int32 with the low 32 bits of `word`."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def _mix64(x: int) -> int:
    """splitmix64's finaliser: every bit of a seed changes half of the key."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
