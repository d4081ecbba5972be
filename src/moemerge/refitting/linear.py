"""Refit one linear map: all batches wait before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.refitting.domains import DomainScales
from moemerge.refitting.ridge import Factor, Fit, fit_map
from moemerge.refitting.sums import FitSums
from moemerge.runtime import ranks
from moemerge.text.batches import Batch

# Values of a block of outputs that are held at a time.
BLOCK_VALUES = {"cpu": 2**23, "cuda": 2**27}
# (batch, rows, their inputs) -> what the map is missing (n, out), and the factor of its output
Missing = Callable[[Batch, slice, Tensor], tuple[Tensor, Tensor | float]]


@dataclass
class Inputs:
    """What every batch is about to give a map; the Gram is summed once for maps that share them."""

    batches: Sequence[Batch]
    values: Sequence[Tensor]  # (tokens, in) by batch
    calibration: FitSums | None = None
    held: FitSums | None = None

    @property
    def width(self) -> int:
        return self.values[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.values[0].device


def sum_up(
    inputs: Inputs, outputs: int, missing: Missing, scales: DomainScales
) -> tuple[FitSums, FitSums]:
    """Sums over calibration rows, and over those held out; of all ranks, for rank 0."""
    fresh = inputs.calibration is None
    if inputs.calibration is None or inputs.held is None:
        made = [FitSums.empty(outputs, inputs.width, inputs.device) for _ in range(2)]
        inputs.calibration, inputs.held = made
        sums = (made[0], made[1])
    else:
        sums = inputs.calibration.sharing_gram(outputs), inputs.held.sharing_gram(outputs)
    for batch, x in zip(inputs.batches, inputs.values, strict=True):
        for rows in blocks(x.shape[0], max(outputs, inputs.width), x.device):
            part = x[rows]
            scale = torch.full((1,), scales(batch), dtype=torch.float64, device=x.device)
            lacking, factor = missing(batch, rows, part)
            sums[batch.holdout].add(part, lacking, scale, factor=factor, gram=fresh)
    for one in sums:
        one.add_up(gram=fresh)
    return sums


def blocks(tokens: int, width: int, device: torch.device) -> Iterator[slice]:
    size = max(1, BLOCK_VALUES.get(device.type, BLOCK_VALUES["cpu"]) // max(1, width))
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


def fit_linear(
    merged: Tensor, sums: tuple[FitSums, FitSums], ridge: float, stored: torch.dtype
) -> tuple[Tensor, Fit]:
    """A map's new weight (out, in)."""
    calibration, held = sums
    return fit_map(merged, calibration, held, Factor(calibration.gram, ridge), stored)


def fitted_by_lead(fit: Callable[[], tuple[Tensor, Fit]]) -> tuple[Tensor, Fit]:
    """What rank 0 fits, which alone has the sums, in every rank."""
    if ranks.count() == 1:
        return fit()

    def made() -> tuple[Tensor, Fit]:
        weight, worth = fit()
        return weight.cpu(), worth

    return ranks.made_by_lead(made)
