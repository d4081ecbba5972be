"""Select elements by magnitude, exactly and without sorting, and rank them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.methods._arithmetic import bits, chunks
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[Any]

_SAMPLE = 2**14  # magnitudes that are sorted to find out where a cut is
_CHUNK = 2**17  # elements that are counted at a time


def kept_count(density: float, n: int) -> int:
    """Return how many of `n` elements a density keeps: int(density·n), but at least one.

    A norm of a few elements would otherwise lose its whole update to rounding.
    """
    if density <= 0:
        return 0
    return min(n, max(1, int(density * n)))


@dataclass(frozen=True)
class Cut:
    """The k-th largest magnitude, and how many elements of that size are kept.

    Among equal magnitudes, lower indices are kept first.
    """

    magnitude: float
    kept: int


def keep_largest_(values: Tensor, k: int) -> None:
    """Zero all but exactly `k` elements of largest magnitude of a flat tensor, in place."""
    if k >= values.numel():
        return
    if k <= 0:
        values.zero_()
        return
    keep_cut_(values, magnitude_cut(values, k))


def keep_cut_(values: Tensor, cut: Cut) -> None:
    """Zero what is below the cut, and the ties that are not kept."""
    if cut.magnitude == 0:  # fewer elements than are kept are nonzero
        return
    for part, below in _parts(values, cut):
        torch.hardshrink(part, below, out=part)


def drop_cut_(values: Tensor, cut: Cut) -> None:
    """Zero what is above the cut, and the ties that belong to it."""
    for part, below in _parts(values, cut):
        part.masked_fill_(part.abs() > below, 0.0)


def magnitude_cut(values: Tensor, k: int) -> Cut:
    """Return the cut below the `k` largest magnitudes of a flat tensor; 1 <= k <= numel."""
    if values.device.type == "cpu":
        return _cut(values.numpy(), k)
    magnitudes = values.abs()
    cut = magnitudes.sort().values[values.numel() - k]
    return Cut(cut.item(), k - int((magnitudes > cut).sum()))


def ordered_at(values: Tensor, places: Sequence[int]) -> list[float]:
    """Return the elements at these positions of the sorted flat tensor."""
    if values.device.type != "cpu":
        ordered = values.sort().values
        return [float(ordered[place]) for place in places]
    copied = values.numpy().copy()  # a tenth of a sort's time, and no indices in memory
    copied.partition(sorted(set(places)))
    return [float(copied[place]) for place in places]


def _cut(values: Floats, k: int) -> Cut:
    """Return the cut. Of many elements, only those between it and a sample's cut are sorted."""
    n = values.size
    if n < 8 * _SAMPLE:
        return _sorted_cut(np.abs(values), k)
    sample = np.sort(np.abs(values[:: n // _SAMPLE | 1]))  # an odd step meets all columns
    guess = sample[(n - k) * sample.size // n]
    above = at_least = n
    for magnitudes in _magnitudes(values):  # NaN counts as the largest
        above -= int(np.count_nonzero(magnitudes <= guess))
        at_least -= int(np.count_nonzero(magnitudes < guess))
    if above < k <= at_least:  # weights in bf16 differ by few distinct amounts
        return Cut(float(guess), k - above)
    missed = max(above - k, k - at_least) * sample.size // n
    reach = missed + 4 * math.isqrt(missed) + 8  # with four standard deviations
    if k <= above:
        last = int(np.searchsorted(sample, guess, side="right")) + reach
        high = sample[last] if last < sample.size else np.inf
        near = [m[(m > guess) & (m <= high)] for m in _magnitudes(values)]
        k_near = k - above + sum(map(len, near))
    else:
        first = int(np.searchsorted(sample, guess)) - reach
        low = sample[first] if first > 0 else 0.0
        near = [m[(m >= low) & (m < guess)] for m in _magnitudes(values)]
        k_near = k - at_least
    if 0 < k_near <= sum(map(len, near)):
        return _sorted_cut(np.concatenate(near), k_near)
    return _sorted_cut(np.abs(values), k)  # the sample is not representative


def _magnitudes(values: Floats) -> Iterator[Floats]:
    """Yield the magnitudes chunk by chunk, in a buffer that stays in cache."""
    buffer = np.empty(min(values.size, _CHUNK), values.dtype)
    for start in range(0, values.size, _CHUNK):
        chunk = values[start : start + _CHUNK]
        yield np.abs(chunk, out=buffer[: chunk.size])


def _sorted_cut(magnitudes: Floats, k: int) -> Cut:
    """Return the cut. Sorts its argument: numpy's partition is slow if many elements are equal."""
    magnitudes.sort()
    rest = magnitudes.size - k
    cut = magnitudes[rest]
    return Cut(float(cut), int(np.count_nonzero(magnitudes[rest:] == cut)))


def _parts(values: Tensor, cut: Cut) -> Iterator[tuple[Tensor, float]]:
    """Yield the values in parts, each with the magnitude that its kept elements exceed."""
    limit = values.new_tensor(cut.magnitude)
    below = float(torch.nextafter(limit, torch.zeros_like(limit)))
    missing = cut.kept
    for at in chunks(values):
        part = values[at]
        if missing == 0:
            yield part, cut.magnitude
            continue
        if part.device.type == "cpu":  # numpy compares several times as fast as torch
            ties = np.abs(part.numpy()) == cut.magnitude
        else:
            ties = (part.abs() == cut.magnitude).cpu().numpy()
        count = int(np.count_nonzero(ties))
        if count <= missing:
            missing -= count
            yield part, below
        else:
            stop = int(np.flatnonzero(ties)[missing - 1]) + 1
            missing = 0
            yield part[:stop], below
            yield part[stop:], cut.magnitude


def ascending_order(rows: Tensor) -> Tensor:
    """Return each row's columns by ascending magnitude as int64; ties by column."""
    magnitudes = rows.abs()
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return magnitudes.sort(dim=1, stable=True).indices
    # The bits of non-negative floats have the order of the floats. With the column in the low bits
    # they make one integer per element, which numpy sorts ten times as fast as torch argsorts.
    packed = bits(magnitudes).to(torch.int64).bitwise_left_shift_(32)
    packed.bitwise_or_(torch.arange(rows.shape[1]))
    packed.numpy().sort(axis=1)
    return packed.bitwise_and_((1 << 32) - 1)
