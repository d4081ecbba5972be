"""Select elements by magnitude, exactly and without sorting, and rank them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.merging.methods._arithmetic import bits, chunks
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[Any]

_SAMPLE = 2**14  # magnitudes that are sorted to find out where a cut is


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
    ties = _kept_ties(values, cut)
    saved = values[ties]
    for at in chunks(values):
        torch.hardshrink(values[at], cut.magnitude, out=values[at])
    values[ties] = saved


def drop_cut_(values: Tensor, cut: Cut) -> None:
    """Zero what is above the cut, and the ties that belong to it."""
    values[_kept_ties(values, cut)] = 0.0
    for at in chunks(values):
        chunk = values[at]
        chunk.masked_fill_(chunk.abs() > cut.magnitude, 0.0)


def magnitude_cut(values: Tensor, k: int) -> Cut:
    """Return the cut below the `k` largest magnitudes of a flat tensor; 1 <= k <= numel."""
    if values.device.type == "cpu":
        return _cut(np.abs(values.numpy()), k)
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


def _cut(magnitudes: Floats, k: int) -> Cut:
    """Return the cut. Of many elements, only those near a sample's cut are partitioned."""
    n = magnitudes.size
    if n < 8 * _SAMPLE:
        return _partition_cut(magnitudes, k)
    sample = np.sort(magnitudes[:: n // _SAMPLE | 1])  # an odd step meets all columns
    place, last = (n - k) * sample.size // n, sample.size - 1
    if (guess := sample[place]) in (sample[place - 1], sample[min(place + 1, last)]):
        # Weights in bf16 differ by few distinct amounts. The sample's cut is then often the cut.
        above = n - int(np.count_nonzero(magnitudes <= guess))
        ties = n - int(np.count_nonzero(magnitudes < guess)) - above
        if above < k <= above + ties:
            return Cut(float(guess), k - above)
    spread = 2 * math.isqrt(sample.size)  # four standard deviations or more
    low, high = sample[max(place - spread, 0)], sample[min(place + spread, last)]
    low = low if place > spread else 0.0
    high = high if place + spread < last else np.inf
    below_high = magnitudes <= high
    above = n - int(np.count_nonzero(below_high))  # NaN counts as the largest
    near = magnitudes[below_high & (magnitudes >= low)]
    if not above < k <= above + near.size:  # the sample is not representative
        return _partition_cut(magnitudes, k)
    return _partition_cut(near, k - above)


def _partition_cut(magnitudes: Floats, k: int) -> Cut:
    """Return the cut by numpy's partition, ten times as fast as torch.kthvalue.

    Overwrites its argument.
    """
    rest = magnitudes.size - k
    magnitudes.partition(rest)
    cut = magnitudes[rest]
    return Cut(float(cut), int(np.count_nonzero(magnitudes[rest:] == cut)))


def _kept_ties(values: Tensor, cut: Cut) -> Tensor:
    """Return the indices of the elements of the cut's magnitude that are kept."""
    found, missing = [], cut.kept
    for at in chunks(values):
        if values.device.type == "cpu":
            here = torch.from_numpy(np.flatnonzero(np.abs(values[at].numpy()) == cut.magnitude))
        else:
            here = (values[at].abs() == cut.magnitude).nonzero().flatten()
        found.append(here + at.start)
        missing -= here.numel()
        if missing <= 0:
            break
    return torch.cat(found)[: cut.kept]


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
