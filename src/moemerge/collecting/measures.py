"""What is kept of gradients: their squares by sequence, or how much a unit's loss depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moemerge.architectures.roles import Unit
from moemerge.checkpoint import Checkpoint
from moemerge.collecting.maths import add_ragged_squares, add_squares, transposed_product


class Measure(Protocol):
    """Sums something of d loss / d W = Σ_t δ_t x_tᵀ into `total` (out, in)."""

    def add(self, total: Tensor, delta: Tensor, x: Tensor) -> None:
        """Of (sequences, tokens, out) and (sequences, tokens, in)."""

    def add_ragged(self, total: Tensor, delta: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        """Of rows (tokens, out) and (tokens, in) that lie sequence by sequence."""

    def finish(self, total: Tensor) -> Tensor:
        """What the sum comes to, (out, in)."""

    def of_unit(self, unit: Unit, values: Tensor) -> Tensor:
        """What the file keeps of a unit: float32, in the shape it has there."""


class Squares:
    """Fisher values: the mean over sequences of each sequence's squared gradient."""

    def __init__(self, sequences: int) -> None:
        self._sequences = sequences

    def add(self, total: Tensor, delta: Tensor, x: Tensor) -> None:
        add_squares(total, delta, x)

    def add_ragged(self, total: Tensor, delta: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        add_ragged_squares(total, delta, x, counts)

    def finish(self, total: Tensor) -> Tensor:
        return (total / self._sequences).float()

    def of_unit(self, unit: Unit, values: Tensor) -> Tensor:
        return values.contiguous()


class Sensitivity:
    """Σ |W · d loss / d W| of a unit, with the loss of all sequences together."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def add(self, total: Tensor, delta: Tensor, x: Tensor) -> None:
        total += transposed_product(delta.flatten(0, 1), x.flatten(0, 1))

    def add_ragged(self, total: Tensor, delta: Tensor, x: Tensor, counts: Sequence[int]) -> None:
        total += transposed_product(delta, x)

    def finish(self, total: Tensor) -> Tensor:
        return total

    def of_unit(self, unit: Unit, values: Tensor) -> Tensor:
        stored = unit.slot.take(self._checkpoint.read(unit.tensor, unit.slot.rows))
        weight = stored.to(values.device, torch.float64)
        return (weight * values).abs().sum().float().reshape(1)
