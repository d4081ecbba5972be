"""Exact selection by magnitude without sorting, and ranks where a method needs them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.merging.methods._arithmetic import bits, chunks
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[Any]


def kept_count(density: float, n: int) -> int:
    """How many of `n` elements a density keeps: int(density·n), but never none of a tensor.

    A norm of a few elements would otherwise lose its whole update to rounding.
    """
    if density <= 0:
        return 0
    return min(n, max(1, int(density * n)))


@dataclass(frozen=True)
class Cut:
    """The k-th largest magnitude, and how many elements of just that size are among the k or not.

    Of equal magnitudes the lower index is kept first.
    """

    magnitude: float
    kept: int
    excess: int


def keep_largest_(values: Tensor, k: int) -> None:
    """Zero all but exactly `k` elements of largest magnitude of a flat tensor, in place."""
    if k >= values.numel():
        return
    if k <= 0:
        values.zero_()
        return
    cut = magnitude_cut(values, k)
    if cut.magnitude == 0:  # fewer than k are not zero
        return
    if cut.kept <= cut.excess:  # few ties to keep: drop all, then put these back
        ties = _first_ties(values, cut.magnitude, cut.kept)
        saved = values[ties]
        _shrink_(values, cut.magnitude)
        values[ties] = saved
    else:
        values[_last_ties(values, cut.magnitude, cut.excess)] = 0.0
        _shrink_(values, _next_below(cut.magnitude, values.dtype))


def drop_largest_(values: Tensor, k: int) -> None:
    """Zero exactly `k` elements of largest magnitude of a flat tensor, in place."""
    if k <= 0:
        return
    if k >= values.numel():
        values.zero_()
        return
    cut = magnitude_cut(values, k)
    values[_first_ties(values, cut.magnitude, cut.kept)] = 0.0
    for at in chunks(values):
        chunk = values[at]
        chunk.masked_fill_(chunk.abs() > cut.magnitude, 0.0)


def magnitude_cut(values: Tensor, k: int) -> Cut:
    """Where the `k` largest magnitudes of a flat tensor end; 1 <= k <= numel."""
    if values.device.type == "cpu":
        return _partition_cut(np.abs(values.numpy()), k)
    magnitudes = values.abs()
    cut = magnitudes.sort().values[values.numel() - k]
    above = int((magnitudes > cut).sum())
    ties = int((magnitudes == cut).sum())
    return Cut(cut.item(), k - above, ties - (k - above))


def ordered_at(values: Tensor, places: Sequence[int]) -> list[float]:
    """The elements that would stand at these places, if a flat tensor were sorted."""
    if values.device.type != "cpu":
        ordered = values.sort().values
        return [float(ordered[place]) for place in places]
    copied = values.numpy().copy()  # a tenth of a sort's time, and no indices in memory
    copied.partition(sorted(set(places)))
    return [float(copied[place]) for place in places]


def _partition_cut(magnitudes: Floats, k: int) -> Cut:
    """By numpy's partition, a vectorised quickselect: ten times as fast as torch.kthvalue, and
    as fast as looking only between the quantiles of a sample. Uses up its argument."""
    rest = magnitudes.size - k
    magnitudes.partition(rest)
    cut = magnitudes[rest]
    kept = int(np.count_nonzero(magnitudes[rest:] == cut))
    return Cut(float(cut), kept, int(np.count_nonzero(magnitudes[:rest] == cut)))


def _shrink_(values: Tensor, threshold: float) -> None:
    """Zero what is not beyond a threshold."""
    for at in chunks(values):
        torch.hardshrink(values[at], threshold, out=values[at])


def _next_below(magnitude: float, dtype: torch.dtype) -> float:
    if dtype == torch.float32:
        return float(np.nextafter(np.float32(magnitude), np.float32(0)))
    return math.nextafter(magnitude, 0.0)


def _first_ties(values: Tensor, magnitude: float, count: int) -> Tensor:
    """The `count` lowest indices of elements of one magnitude."""
    return _ties(values, chunks(values), magnitude, count)[:count]


def _last_ties(values: Tensor, magnitude: float, count: int) -> Tensor:
    """The `count` highest indices of elements of one magnitude."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    ties = _ties(values, reversed(list(chunks(values))), magnitude, count)
    return ties.sort().values[-count:]


def _ties(values: Tensor, walk: Iterable[slice], magnitude: float, count: int) -> Tensor:
    """Indices of elements of one magnitude, chunk by chunk until there are enough."""
    indices, missing = [torch.empty(0, dtype=torch.int64, device=values.device)], count
    for at in walk:
        if missing <= 0:
            break
        if values.device.type == "cpu":
            here = torch.from_numpy(np.flatnonzero(np.abs(values[at].numpy()) == magnitude))
        else:
            here = (values[at].abs() == magnitude).nonzero().flatten()
        indices.append(here + at.start)
        missing -= here.numel()
    return torch.cat(indices)


def ascending_order(rows: Tensor) -> Tensor:
    """Per row, the columns by ascending magnitude as int64; equal magnitudes by column."""
    magnitudes = rows.abs()
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return magnitudes.sort(dim=1, stable=True).indices
    # The bits of non-negative floats order like the floats. Packed above the column they make one
    # integer per element, which numpy sorts ten times as fast as torch argsorts.
    packed = bits(magnitudes).to(torch.int64).bitwise_left_shift_(32)
    packed.bitwise_or_(torch.arange(rows.shape[1]))
    packed.numpy().sort(axis=1)
    return packed.bitwise_and_((1 << 32) - 1)
