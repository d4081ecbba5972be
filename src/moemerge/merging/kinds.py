"""Plan tensors of one kind alike.

Thousands of experts differ in nothing but their names. If all models have one structure and keep
their layers, the first tensor of a kind is planned, and the others like it.
"""

from __future__ import annotations

from collections.abc import Mapping

from moemerge.architectures.roles import WHOLE, Unit
from moemerge.checkpoint import TensorInfo
from moemerge.merging.matching import Destination, UnitIndex
from moemerge.merging.plan import MergeBlock, UnitInput, UnitMerge

Kind = tuple[object, ...]  # everything that a plan depends on besides names


class PlannedKinds:
    """The first planned tensor of each kind."""

    def __init__(self, index: Mapping[str, UnitIndex]) -> None:
        self._index = index
        self._planned: dict[Kind | None, tuple[TensorInfo, MergeBlock]] = {}
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
        if not self._is_uniform or len(units) > 1 or units[0].slot != WHOLE:
            return None
        return to.slice_index, to.t, units[0].role, stored.shape, stored.dtype

    def add(self, kind: Kind | None, planned: tuple[TensorInfo, list[MergeBlock]] | None) -> None:
        """Remember the plan of a tensor that is merged at once."""
        if kind is None or planned is None:
            return
        info, blocks = planned
        if len(blocks) == 1 and len(blocks[0].merges) == 1:
            self._planned[kind] = info, blocks[0]

    def like(self, kind: Kind | None, unit: Unit) -> tuple[TensorInfo, MergeBlock] | None:
        """Return the plan of a tensor of a planned kind, else None."""
        if kind not in self._planned:
            return None
        info, block = self._planned[kind]
        (merge,), name = block.merges, unit.tensor
        key = None if merge.inputs[0].statistics is None else unit.key
        reads = [UnitInput(s.model, name, WHOLE, s.params, key, s.scale) for s in merge.reads]
        own = UnitMerge(
            unit,
            merge.method,
            merge.options,
            tuple(reads[: len(merge.inputs)]),
            None if merge.base is None else reads[-1],
            wraps=merge.wraps,
            whole=merge.whole,
        )
        info = TensorInfo(name, info.dtype, info.shape, info.nbytes)
        return info, MergeBlock(name, None, info.shape, (own,))
