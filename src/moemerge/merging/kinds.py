"""Plan tensors of one kind alike.

Thousands of experts differ in nothing but their names. If all models have one structure and keep
their layers, the first tensor of a kind is planned, and the others like it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moemerge.architectures.roles import WHOLE, Unit
from moemerge.checkpoint import TensorInfo
from moemerge.merging.matching import Destination, UnitIndex
from moemerge.merging.plan import Account, MergeBlock

Kind = tuple[object, ...]  # everything that a plan depends on besides names


class PlannedTensor(NamedTuple):
    """An output tensor that is merged at once."""

    info: TensorInfo
    block: MergeBlock
    fates: Mapping[str, Account]  # of the tensor in each model


class PlannedKinds:
    """The first planned tensor of each kind."""

    def __init__(self, index: Mapping[str, UnitIndex]) -> None:
        self._index = index
        self._planned: dict[Kind, PlannedTensor] = {}
        self._layer: Destination | None = None
        self._is_uniform = False  # whether all models have the layer's tensors alike

    def kind(self, reference: str, name: str, to: Destination) -> Kind | None:
        """Return the kind of a reference model's tensor; None if it must be planned alone."""
        index = self._index[reference]
        if to is not self._layer:
            self._layer = to
            self._is_uniform = to.layer is not None and all(
                self._index[model].by_tensor is index.by_tensor and layer == to.layer
                for model, layer in to.layers.items()
            )
        units, stored = index.by_tensor[name], index.model.checkpoint.tensors[name]
        if not self._is_uniform or len(units) > 1 or units[0].slot is not WHOLE:
            return None
        return to.slice_index, to.t, units[0].role, stored.shape, stored.dtype

    def add(self, kind: Kind, planned: PlannedTensor) -> None:
        """Remember the plan of a tensor that is merged at once."""
        self._planned[kind] = planned

    def like(self, kind: Kind | None, unit: Unit) -> PlannedTensor | None:
        """Return the plan of a tensor of a planned kind, else None."""
        first = None if kind is None else self._planned.get(kind)
        if first is None:
            return None
        info = TensorInfo(unit.tensor, first.info.dtype, first.info.shape, first.info.nbytes)
        block = MergeBlock(unit.tensor, None, info.shape, first.block.planned, unit=unit)
        return PlannedTensor(info, block, first.fates)
