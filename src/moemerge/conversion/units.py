"""Units of a checkpoint by key, which are the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.errors import CheckpointError
from moemerge.families.opened import OpenModel
from moemerge.families.roles import Unit


@dataclass(frozen=True)
class StoredUnits:
    """The units of a checkpoint by key."""

    model: OpenModel

    @property
    def by_key(self) -> Mapping[str, Unit]:
        return self.model.architecture.units_by_key

    def find(self, unit: Unit) -> Unit:
        """Return this model's counterpart of a unit. Refuse one that is missing or differs."""
        own = self.by_key.get(unit.key)
        if own is None or own.shape != unit.shape:
            found = "is missing" if own is None else f"has shape {list(own.shape)}"
            raise CheckpointError(
                f"{self.model.label}: {unit.key} {found}, expected {list(unit.shape)}",
                hint="both models must be of one size, and their downloads complete",
            )
        return own

    def read(self, unit: Unit, rows: tuple[int, int] | None = None) -> Tensor:
        """Read a unit as an (out, in) view; `rows` only for one that is a whole tensor."""
        own = self.find(unit)
        return own.slot.take(self.model.checkpoint.read(own.tensor, rows or own.slot.rows))

    def assemble(
        self, units: Sequence[Unit], shape: Sequence[int], dtype: torch.dtype, start: int = 0
    ) -> Tensor:
        """Return a tensor of another layout, or its rows from `start` on: one expert of a stack."""
        block = torch.empty(tuple(shape), dtype=dtype)
        for unit in units:
            rows = unit.slot.rows
            part = block if rows is None else block[rows[0] - start : rows[1] - start]
            unit.slot.take(part).copy_(self.read(unit))
        return block
