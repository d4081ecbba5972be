"""Read the units of a model by their keys, which are the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moemerge.architectures.architecture import Architecture
from moemerge.architectures.opened import OpenModel
from moemerge.architectures.roles import Unit
from moemerge.checkpoint import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.features.loading import build_skeleton


@dataclass(frozen=True)
class StoredUnits:
    """The units of a checkpoint by key."""

    model: OpenModel

    @cached_property
    def by_key(self) -> Mapping[str, Unit]:
        names = self.model.checkpoint.tensors
        return {u.key: u for name in names for u in self.model.architecture.units(name)}

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


def loaded_architecture(model: OpenModel) -> tuple[Any, Architecture]:
    """Return the model as transformers builds it, without weights, and its structure."""
    skeleton = build_skeleton(model.checkpoint, torch.float32)
    infos = {
        name: TensorInfo.of(name, value.dtype, tuple(value.shape))
        for name, value in skeleton.state_dict().items()
    }
    return skeleton, Architecture.of(model.checkpoint.config, infos)
