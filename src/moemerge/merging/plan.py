"""The plan of a merge, tensor by tensor, decided and checked before the first tensor is read.

    output tensor -> blocks (contiguous rows, written together) -> units (inputs of a method)

A block is read, computed and written at once. It is a whole tensor, one expert of a stack or, for
elementwise methods, a range of rows.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moemerge.checkpoint import Checkpoint, TensorInfo
from moemerge.checkpoint.quantised.tensor import QuantisedInfo
from moemerge.checkpoint.tensors import RowRange
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import CheckpointError
from moemerge.families.opened import OpenModel
from moemerge.families.roles import WHOLE, Slot, Unit
from moemerge.methods._sparsify import Keep
from moemerge.methods.method import Arguments, MergeMethod
from moemerge.methods.wrappers import MergeWrapper
from moemerge.runtime.dtypes import Dtype
from moemerge.statistics.file import Statistics

if TYPE_CHECKING:
    from torch import Tensor

# Tensors that methods hold besides their inputs: result, task-vector sum, mask, magnitudes.
TEMPORARIES = 4
# Elementwise methods process tensors in runs of about this many elements (16 MB in float32).
RUN_ELEMENTS = 2**22
# Methods that drop elements of whole task vectors do so for larger tensors than this, after passes
# over all rows.
LARGE_ELEMENTS = 2**24

Prepare = Callable[[Sequence["Tensor"]], list["Tensor"]]


@dataclass(frozen=True)
class NeuronScale:
    """A factor on the change of each neuron of an MLP."""

    labels: str  # each neuron's group, one of LETTERS
    shares: tuple[float, ...]  # one factor per group
    axis: int  # the unit's neuron axis: rows of gate and up, columns of down


@dataclass(frozen=True)
class UnitInput:
    """One model's stored unit."""

    model: str  # key of MergePlan.models
    tensor: str
    slot: Slot
    statistics: str | None = None  # the unit's key in this model's statistics, if they are used
    # Factor on the change from the base, if the method has no weights or neurons have their own.
    scale: float | NeuronScale = 1.0


@dataclass(frozen=True)
class UnitMerge:
    """One call of a method. `base` is not among `inputs`; it may be absent."""

    unit: Unit
    method: MergeMethod
    arguments: Arguments  # of the method, from its parameters in the config
    inputs: tuple[UnitInput, ...]
    base: UnitInput | None
    # Maps tensors of different vocabularies to one shape; called with the inputs, then the base.
    prepare: Prepare | None = None
    wraps: tuple[tuple[MergeWrapper, Arguments], ...] = ()  # innermost first
    whole: bool = False  # never split into runs
    large: LargeUnit | None = None  # the unit of which this merges some rows

    @property
    def divisible(self) -> bool:
        """Return whether some rows can be merged alone if the method can do that."""
        neurons = any(isinstance(source.scale, NeuronScale) for source in self.inputs)
        slots = (self.unit.slot, *(source.slot for source in self.reads))
        stored_whole = all(slot == WHOLE for slot in slots)
        return stored_whole and not (self.wraps or self.whole or neurons or self.prepare)

    @property
    def reads(self) -> tuple[UnitInput, ...]:
        """Return everything that is read: the inputs, then the base."""
        return self.inputs if self.base is None else (*self.inputs, self.base)

    def of(self, unit: Unit) -> UnitMerge:
        """Return the same merge of another whole tensor that all models store alike."""
        key = None if self.inputs[0].statistics is None else unit.key
        reads = [UnitInput(s.model, unit.tensor, WHOLE, key, s.scale) for s in self.reads]
        return replace(
            self,
            unit=unit,
            inputs=tuple(reads[: len(self.inputs)]),
            base=None if self.base is None else reads[-1],
        )

    @property
    def statistics_bytes(self) -> int:
        """Return the memory for the models' statistics of this unit; 0 if the method uses none."""
        kind, count = self.method.schema.statistics, len(self.inputs)
        if kind is None:
            return 0
        if kind == "fisher":
            return 4 * count * math.prod(self.unit.shape)
        # The Gram matrices in float32, and the solver's in float64.
        width = self.unit.shape[-1] if len(self.unit.shape) == 2 else 0
        return width**2 * (4 * count + 8 * (count + 2))


@dataclass
class LargeUnit:
    """A unit that is merged in runs of rows; the first run surveys all of them."""

    merge: UnitMerge
    runs: tuple[RowRange, ...]
    keeps: Sequence[Keep] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class MergeBlock:
    """Rows of one output tensor that are written together."""

    tensor: str
    rows: RowRange | None
    shape: tuple[int, ...]
    planned: tuple[UnitMerge, ...]  # empty: a copy
    copy: UnitInput | None = None
    must_equal: tuple[UnitInput, ...] = ()  # integer tensors of other models, checked for equality
    unit: Unit | None = None  # if another tensor of its kind was planned: what is merged here

    @cached_property
    def merges(self) -> tuple[UnitMerge, ...]:
        """Return the merges of all units in these rows."""
        return self.planned if self.unit is None else (self.planned[0].of(self.unit),)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def working_bytes(self) -> int:
        """Return the memory to compute this block: float32 inputs and a few temporaries."""
        if not self.planned:
            return 8 * self.numel * (1 + len(self.must_equal))
        widest = max([len(m.inputs) + (m.base is not None) for m in self.planned])
        statistics = max([m.statistics_bytes for m in self.planned])
        return 4 * self.numel * (2 * widest + TEMPORARIES) + statistics


def split_into_blocks(info: TensorInfo, merges: list[UnitMerge]) -> Iterator[MergeBlock]:
    """Group a tensor's units by the rows they share. Split large units into runs if possible."""
    first = merges[0]
    if len(merges) == 1 and first.divisible:
        if first.method.elementwise:
            yield from _runs(info, first, _run_rows(info))
            return
        step = _run_rows(info)
        large = first.method.in_rows and math.prod(first.unit.shape) > LARGE_ELEMENTS
        if large and info.rows > step:
            unit = LargeUnit(first, tuple(filter(None, _row_ranges(info, step))))
            yield from _runs(info, replace(first, large=unit), step)
            return
    by_rows: dict[RowRange | None, list[UnitMerge]] = defaultdict(list)
    for merge in merges:
        by_rows[merge.unit.slot.rows].append(merge)
    for rows, group in by_rows.items():
        if isinstance(info, QuantisedInfo) and rows is not None and not info.holds_whole(rows):
            raise CheckpointError(
                f"rows {rows[0]}:{rows[1]} of {info.name} are merged on their own, but stored as "
                f"{info.stored_as} together with others",
                hint="leave `requantize` out",
            )
        yield MergeBlock(info.name, rows, info.block_shape(rows), tuple(group))


def copy_in_blocks(info: TensorInfo, source: UnitInput) -> Iterator[MergeBlock]:
    """Copy a tensor, a large one in runs of rows."""
    for rows in _row_ranges(info, _run_rows(info)):
        yield MergeBlock(info.name, rows, info.block_shape(rows), (), copy=source)


def _run_rows(info: TensorInfo) -> int:
    """Return the rows of a run of about `RUN_ELEMENTS` elements."""
    step = max(1, RUN_ELEMENTS * info.rows // max(1, info.nbytes // info.dtype.itemsize))
    return -(-step // info.step) * info.step if isinstance(info, QuantisedInfo) else step


def _row_ranges(info: TensorInfo, step: int) -> Sequence[RowRange | None]:
    """Return the rows of each run of at most `step` rows; None for a tensor that is one run."""
    if info.rows <= step:
        return [None]
    return list(pairwise([*range(0, info.rows, step), info.rows]))


def _runs(info: TensorInfo, merge: UnitMerge, step: int) -> Iterator[MergeBlock]:
    for rows in _row_ranges(info, step):
        part = merge if rows is None else in_rows(merge, rows)
        yield MergeBlock(info.name, rows, info.block_shape(rows), (part,))


def in_rows(merge: UnitMerge, rows: RowRange) -> UnitMerge:
    """Return the merge of some rows of a whole unit."""
    slot = Slot(rows=rows)
    return replace(
        merge,
        unit=replace(merge.unit, slot=slot),
        inputs=tuple(replace(u, slot=slot) for u in merge.inputs),
        base=None if merge.base is None else replace(merge.base, slot=slot),
    )


class Fate(StrEnum):
    """How an input tensor is used."""

    MERGED = "merged"
    COPIED = "copied"
    DROPPED = "dropped"


class Account(NamedTuple):
    """How one input tensor is used, and why; the reason is empty for an ordinary merge."""

    fate: Fate
    reason: str = ""


Accounts = Mapping[str, Mapping[str, Account]]  # by model and tensor
MERGED = Account(Fate.MERGED)
REFERENCE = "reference only"


class Ledger:
    """Records how every input tensor is used, while the plan is made."""

    def __init__(self) -> None:
        self._accounts: dict[str, dict[str, Account]] = defaultdict(dict)

    def record(self, model: str, tensor: str, account: Account) -> None:
        """Record a use of a tensor. It replaces an earlier drop: a stack may be used in part."""
        accounts = self._accounts[model]
        known = accounts.get(tensor)
        if known is None or known.fate is Fate.DROPPED:
            accounts[tensor] = account

    def tensors(self, model: str) -> Collection[str]:
        """Return the recorded tensors of a model."""
        return self._accounts[model].keys()

    def complete(self, models: Mapping[str, OpenModel], references: Collection[str]) -> Accounts:
        """Return one account for every input tensor. Unused tensors are dropped.

        `references` are the models that are in no slice.
        """
        for name, model in models.items():
            known = self._accounts[name]
            for tensor in model.checkpoint.tensors:
                if tensor not in known:
                    why = REFERENCE if name in references else _unused(model, tensor)
                    known[tensor] = Account(Fate.DROPPED, why)
        return self._accounts


def _unused(model: OpenModel, tensor: str) -> str:
    layer = model.architecture.layer_of(tensor)
    return f"layer {layer} is in no slice" if layer is not None else "outside every slice"


@dataclass(frozen=True)
class MergePlan:
    """The blocks of every output tensor, and how every input tensor is used."""

    models: Mapping[str, OpenModel]  # by name
    tensors: tuple[TensorInfo, ...]  # output tensors, in writing order
    blocks: tuple[MergeBlock, ...]
    accounts: Accounts
    input_dtype: Dtype | None  # the config's `dtype`: inputs are cast to it first
    seed: int = 0
    notices: tuple[str, ...] = ()
    layer_origins: tuple[tuple[str, int], ...] = ()  # (reference model, its layer) by layer
    quantised: Mapping[str, str] = field(default_factory=dict)  # output tensor -> model
    # By the model's name; empty until they are computed.
    statistics: Mapping[tuple[str, StatisticsKind], Statistics] = field(default_factory=dict)

    @cached_property
    def dtypes(self) -> Mapping[str, Dtype]:
        """Return the dtype of each output tensor."""
        return {t.name: t.dtype for t in self.tensors}

    @property
    def input_folders(self) -> list[Path]:
        return [folder for model in self.models.values() for folder in model.checkpoint.folders]

    @property
    def bytes_written(self) -> int:
        return sum(t.stored_bytes for t in self.tensors)

    def quantised_tensors(self) -> dict[str, tuple[QuantisedInfo, Checkpoint]]:
        """Return the output tensors written quantised, each with the checkpoint it is like."""
        return {
            info.name: (info, self.models[self.quantised[info.name]].checkpoint)
            for info in self.tensors
            if isinstance(info, QuantisedInfo)
        }

    @property
    def bytes_read(self) -> int:
        """Return the bytes of all input files. A file that several models share counts once."""
        files = {s.path for s in self.statistics.values()}
        weights: dict[tuple[int, ...], int] = {}
        for model in self.models.values():
            weights |= model.checkpoint.file_sizes
        return sum(weights.values()) + sum(path.stat().st_size for path in files)

    @property
    def peak_block_bytes(self) -> int:
        return max((b.working_bytes for b in distinct(self.blocks)), default=0)


def distinct(blocks: Iterable[MergeBlock]) -> Iterable[MergeBlock]:
    """Return one of the blocks that were planned alike: all take the same memory."""
    return {(id(b.planned) if b.planned else id(b), b.shape): b for b in blocks}.values()
