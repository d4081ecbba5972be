"""What a merge will do, tensor by tensor, decided and checked before the first tensor is read.

    output tensor -> blocks (contiguous rows, written in one piece) -> units (what a method sees)

A block is the smallest thing that is read, computed and written at once: a whole tensor, one
expert of a stack, or, for methods that act on each element alone, a run of rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from moemerge.architectures.opened import OpenModel
from moemerge.architectures.roles import WHOLE, Slot, Unit
from moemerge.checkpoint import Checkpoint, TensorInfo
from moemerge.checkpoint.quantised.tensor import QuantisedInfo
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import CheckpointError
from moemerge.merging.method import MergeMethod
from moemerge.merging.wrapper import Wrap
from moemerge.runtime.dtypes import Dtype

if TYPE_CHECKING:
    from torch import Tensor

    from moemerge.statistics.file import Statistics

# Result, task-vector sum, mask and magnitudes: what the methods hold besides their inputs.
TEMPORARIES = 4
# Elementwise methods take large tensors in runs of this many elements (64 MB in float32).
RUN_ELEMENTS = 2**24

Prepare = Callable[[Sequence["Tensor"]], list["Tensor"]]


@dataclass(frozen=True)
class NeuronScale:
    """How much of a change counts in each neuron of an MLP."""

    labels: str  # each neuron's group, one of LETTERS
    shares: tuple[float, ...]  # of the groups
    axis: int  # of the unit, along which its neurons lie: rows of gate and up, columns of down


@dataclass(frozen=True)
class UnitInput:
    """Where one model keeps a unit, and the method's parameters for it there."""

    model: int  # position in MergePlan.models
    tensor: str
    slot: Slot
    params: Any = None
    statistics: str | None = None  # the unit's key in this model's statistics, where they count
    # Of its change against the base: where the method has no weights, or neurons have their own.
    scale: float | NeuronScale = 1.0


@dataclass(frozen=True)
class UnitMerge:
    """One call of a method. `base` is apart from `inputs`, or absent."""

    unit: Unit
    method: MergeMethod
    options: Any
    inputs: tuple[UnitInput, ...]
    base: UnitInput | None
    # Brings tensors of unlike vocabularies to one shape; gets the inputs, then the base.
    prepare: Prepare | None = None
    wraps: tuple[Wrap, ...] = ()  # around the method, the first nearest to it
    whole: bool = False  # never cut into runs

    @property
    def elementwise(self) -> bool:
        """Whether every element is computed alone: wrappers look at whole units."""
        scaled = any(isinstance(source.scale, NeuronScale) for source in self.inputs)
        return self.method.elementwise and not (self.wraps or self.whole or scaled)

    @property
    def reads(self) -> tuple[UnitInput, ...]:
        """All that is read for it: the inputs, then the base."""
        return self.inputs if self.base is None else (*self.inputs, self.base)

    @property
    def statistics_bytes(self) -> int:
        """Memory for the models' statistics of this unit, where its method uses any."""
        kind, count = self.method.schema.statistics, len(self.inputs)
        if kind is None:
            return 0
        if kind == "fisher":
            return 4 * count * math.prod(self.unit.shape)
        # The Gram matrices in float32, and the float64 ones of the solve.
        width = self.unit.shape[-1] if len(self.unit.shape) == 2 else 0
        return width**2 * (4 * count + 8 * (count + 2))


@dataclass(frozen=True)
class Block:
    """Rows of one output tensor that are written together."""

    tensor: str
    rows: tuple[int, int] | None
    shape: tuple[int, ...]
    merges: tuple[UnitMerge, ...]  # empty: a copy
    copy: UnitInput | None = None
    must_equal: tuple[UnitInput, ...] = ()  # integer tensors: the other models' must agree

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def working_bytes(self) -> int:
        """Memory that computing this block takes: float32 inputs, and a few temporaries."""
        if not self.merges:
            return 8 * self.numel * (1 + len(self.must_equal))
        widest = max(len(m.reads) for m in self.merges)
        statistics = max(m.statistics_bytes for m in self.merges)
        return 4 * self.numel * (2 * widest + TEMPORARIES) + statistics


def split_into_blocks(info: TensorInfo, merges: list[UnitMerge]) -> Iterator[Block]:
    """The units of a tensor, grouped by the rows they share; large elementwise ones in runs."""
    if len(merges) == 1 and _splits(merges[0]):
        yield from _runs(info, merges[0])
        return
    by_rows: dict[tuple[int, int] | None, list[UnitMerge]] = defaultdict(list)
    for merge in merges:
        by_rows[merge.unit.slot.rows].append(merge)
    for rows, group in by_rows.items():
        if isinstance(info, QuantisedInfo) and rows is not None and not info.holds_whole(rows):
            raise CheckpointError(
                f"rows {rows[0]}:{rows[1]} of {info.name} are merged on their own, but stored as "
                f"{info.stored_as} together with others",
                hint="leave `requantize` out",
            )
        yield Block(info.name, rows, info.block_shape(rows), tuple(group))


def _splits(merge: UnitMerge) -> bool:
    whole = all(u.slot == WHOLE for u in merge.reads)
    return whole and merge.elementwise and merge.prepare is None and bool(merge.unit.shape)


def _runs(info: TensorInfo, merge: UnitMerge) -> Iterator[Block]:
    step = max(1, RUN_ELEMENTS * info.rows // max(1, info.nbytes // info.dtype.itemsize))
    if isinstance(info, QuantisedInfo):
        step = -(-step // info.step) * info.step
    for start in range(0, info.rows, step):
        rows = (start, min(start + step, info.rows))
        slot = Slot(rows=rows)
        part = replace(
            merge,
            unit=replace(merge.unit, slot=slot),
            inputs=tuple(replace(u, slot=slot) for u in merge.inputs),
            base=None if merge.base is None else replace(merge.base, slot=slot),
        )
        yield Block(info.name, rows, info.block_shape(rows), (part,))


class Fate(StrEnum):
    """What becomes of an input tensor."""

    MERGED = "merged"
    COPIED = "copied"
    DROPPED = "dropped"


@dataclass(frozen=True)
class Account:
    """What becomes of one input tensor, and why (empty for the ordinary case)."""

    model: str
    tensor: str
    fate: Fate
    reason: str = ""


class Ledger:
    """What becomes of every input tensor; filled while the plan is made."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str], Account] = {}

    def record(self, model: str, tensor: str, fate: Fate, reason: str = "") -> None:
        """A use outweighs an earlier dropping: a stack may be used in part."""
        known = self._accounts.get((model, tensor))
        if known is None or known.fate is Fate.DROPPED:
            self._accounts[model, tensor] = Account(model, tensor, fate, reason)

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._accounts

    def complete(self, models: Mapping[str, OpenModel]) -> Iterator[Account]:
        """One account for every input tensor: what nothing has used is dropped."""
        for name, model in models.items():
            for tensor in model.checkpoint.tensors:
                known = self._accounts.get((name, tensor))
                yield known or Account(name, tensor, Fate.DROPPED, _unused(model, tensor))


def _unused(model: OpenModel, tensor: str) -> str:
    layer = model.architecture.layer_of(tensor)
    return f"layer {layer} is in no slice" if layer is not None else "outside every slice"


@dataclass(frozen=True)
class MergePlan:
    """Every output tensor of a merge in blocks, and what becomes of every input tensor."""

    models: tuple[OpenModel, ...]
    tensors: tuple[TensorInfo, ...]  # of the output, in writing order
    blocks: tuple[Block, ...]
    accounts: tuple[Account, ...]
    input_dtype: Dtype | None  # the config's `dtype`: inputs are cast to it first
    seed: int
    notices: tuple[str, ...] = ()
    quantised: Mapping[str, int] = field(default_factory=dict)  # output tensor -> model
    # By the model's position; empty while they are still to be computed.
    statistics: Mapping[tuple[int, StatisticsKind], Statistics] = field(default_factory=dict)

    @cached_property
    def dtypes(self) -> Mapping[str, Dtype]:
        """Of the output's tensors, by name."""
        return {t.name: t.dtype for t in self.tensors}

    @property
    def bytes_written(self) -> int:
        return sum(t.stored_bytes for t in self.tensors)

    def quantised_tensors(self) -> dict[str, tuple[QuantisedInfo, Checkpoint]]:
        """The output tensors that are written quantised, each with the model that stores it so."""
        return {
            info.name: (info, self.models[self.quantised[info.name]].checkpoint)
            for info in self.tensors
            if isinstance(info, QuantisedInfo)
        }

    @property
    def bytes_read(self) -> int:
        files = {s.path for s in self.statistics.values()}
        weights = sum(m.checkpoint.total_bytes for m in self.models)
        return weights + sum(path.stat().st_size for path in files)

    @property
    def peak_block_bytes(self) -> int:
        return max((b.working_bytes for b in self.blocks), default=0)
