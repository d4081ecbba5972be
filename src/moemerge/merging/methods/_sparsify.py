"""Ways to thin out a task vector, in place, each with its rescaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moemerge.merging.methods._arithmetic import (
    bits,
    chunk_size,
    chunks,
    magnitude,
    total_magnitude,
)
from moemerge.merging.methods._random import Stream, keep_threshold
from moemerge.merging.methods._selection import (
    ascending_order,
    drop_largest_,
    keep_largest_,
    kept_count,
)
from moemerge.merging.methods._task_vectors import TaskVector
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def trim_(vector: TaskVector, density: float, *, rescale: bool) -> None:
    """Keep the largest magnitudes (TIES)."""
    before = total_magnitude(vector.values) if rescale else 0.0
    keep_largest_(vector.values, kept_count(density, vector.values.numel()))
    _rescale(vector, before, rescale=rescale)


def trim_both_ends_(vector: TaskVector, density: float, gamma: float, *, rescale: bool) -> None:
    """Drop the fraction `gamma` of largest magnitudes, then keep the largest of the rest.

    Where density + gamma exceed one, fewer of the largest are dropped: density has precedence.
    """
    n = vector.values.numel()
    kept = kept_count(density, n)
    outliers = min(int(gamma * n), n - kept)
    before = total_magnitude(vector.values) if rescale else 0.0
    # The outliers go last, so that both cuts rank the same values.
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
    for at in chunks(values):  # measured while the chunk is in cache, not in passes of their own
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

    From density - epsilon for the smallest to density + epsilon for the largest.
    `rescale`: "l1" restores the L1 norm, "probability" divides each element by its own.
    """
    values = vector.values
    if density >= 1 or values.numel() == 0:
        return
    before = total_magnitude(values) if rescale == "l1" else 0.0
    matrix = values.view(rows, -1)
    ramp = _keep_probabilities(matrix.shape[1], density, epsilon)
    thresholds = torch.tensor([keep_threshold(p) for p in ramp], dtype=torch.int16)
    gains = torch.ones(len(ramp), dtype=values.dtype)
    if rescale == "probability":
        gains = torch.tensor([1 / p if p > 0 else 0.0 for p in ramp], dtype=values.dtype)
    _apply_ranked_(matrix, thresholds.to(values.device), gains.to(values.device), seed)
    _rescale(vector, before, rescale=rescale == "l1")


def _keep_probabilities(n: int, density: float, epsilon: float) -> list[float]:
    """By ascending rank. A row of one element has no rank: it is kept with the density itself."""
    if n == 1:
        return [density]
    low = density - epsilon
    return [min(1.0, max(0.0, low + 2 * epsilon * r / (n - 1))) for r in range(n)]


def _apply_ranked_(matrix: Tensor, thresholds: Tensor, gains: Tensor, seed: int) -> None:
    """Multiply each row by its gains where a draw keeps the element, else by zero, in place.

    Thresholds and gains are by ascending magnitude, and so are the draws.
    """
    columns = matrix.shape[1]
    step = max(1, chunk_size(matrix.device) // columns)
    stream = Stream(seed, min(step, matrix.shape[0]) * columns, matrix.device)
    for first in range(0, matrix.shape[0], step):
        chunk = matrix[first : first + step]
        keep = stream.keep(first * columns, chunk.numel(), thresholds).view_as(chunk)
        ranked = gains.expand(chunk.shape).contiguous()
        bits(ranked).bitwise_and_(keep.to(bits(ranked).dtype))
        chunk.mul_(torch.empty_like(chunk).scatter_(1, ascending_order(chunk), ranked))


def _rescale(vector: TaskVector, before: float, *, rescale: bool) -> None:
    """Let the scale restore the L1 norm that the vector had `before`."""
    after = total_magnitude(vector.values) if rescale else 0.0
    if after > 0:
        vector.scale *= before / after
