"""Random masks that depend on a stream's number and an element's index alone.

A hash of the index takes the place of a generator with state, so the order of work, its split
into blocks, the number of threads and the device cannot change a single bit. Plain 32-bit integer
arithmetic, which wraps alike on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moemerge.merging.methods._blocks import bits, blocks, scratch

_WORD = 1 << 32
_WEYL = 0x9E3779B9  # 2^32 / golden ratio: neighbouring indexes land far apart
# Multipliers and shifts of the two-round finaliser "lowbias32" (Wellons, hash-prospector).
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_SHIFTS = (16, 15)
_RESOLUTION = 31  # bits of a draw that a probability is compared with


def keep_threshold(probability: float) -> int:
    """The integer t for which `draw >> 1 < t` holds with `probability`; 0 and 1 are exact."""
    return round(probability * (1 << _RESOLUTION)) - (1 << (_RESOLUTION - 1))


class Stream:
    """An endless row of independent 32-bit numbers, numbered by element index."""

    def __init__(self, seed: int, capacity: int, device: torch.device) -> None:
        self._seed = seed
        counter = torch.arange(capacity, dtype=torch.int32, device=device)
        self._weyl = counter.mul_(_signed(_WEYL))
        self._out = torch.empty_like(counter)
        self._shifted = torch.empty_like(counter)

    def draw(self, start: int, count: int) -> Tensor:
        """Numbers `start` to `start + count` as int32; the high bits are the better ones.

        The buffer belongs to the stream: the next call overwrites it.
        """
        here = min(count, _WORD - start % _WORD)
        self._fill(start, slice(0, here))
        if here < count:
            self._fill(start + here, slice(here, count))
        return self._out[:count]

    def keep(self, start: int, count: int, threshold: int | Tensor) -> Tensor:
        """-1 (all bits set) where an element is kept, else 0, as int32; see `keep_threshold`."""
        drawn = self.draw(start, count)
        drawn.bitwise_right_shift_(1)  # so that the difference cannot overflow
        if isinstance(threshold, Tensor):
            drawn.view(-1, threshold.numel()).sub_(threshold)
        else:
            drawn.sub_(threshold)
        return drawn.bitwise_right_shift_(_RESOLUTION)

    def _fill(self, start: int, where: slice) -> None:
        key = _mix64(self._seed + (start // _WORD) * 0xD1342543DE82EF95)
        h, shifted = self._out[where], self._shifted[where]
        torch.add(
            self._weyl[: h.numel()],
            _signed(start * _WEYL + key),
            out=h,
        )
        # The key enters twice: by its first half alone, two streams would be the same row of
        # numbers, shifted.
        for shift, multiplier, addend in zip(_SHIFTS, _MULTIPLIERS, (key >> 32, 0), strict=True):
            torch.bitwise_right_shift(h, shift, out=shifted)
            shifted.bitwise_and_((1 << (32 - shift)) - 1)
            h.bitwise_xor_(shifted).mul_(_signed(multiplier))
            if addend:
                h.add_(_signed(addend))


def keep_randomly_(values: Tensor, probability: float, seed: int) -> None:
    """Zero each element of a flat tensor, in place, unless its draw falls below `probability`."""
    if values.numel() == 0 or probability >= 1:
        return
    stream = Stream(seed, scratch(values, 1)[0].numel(), values.device)
    threshold = keep_threshold(probability)
    for b in blocks(values):
        kept = bits(values[b])
        kept.bitwise_and_(stream.keep(b.start, b.stop - b.start, threshold).to(kept.dtype))


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
