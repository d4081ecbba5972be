"""What a merge will do, tensor by tensor, decided and checked before the first tensor is read.

    output tensor -> blocks (contiguous rows, written in one piece) -> units (what a method sees)

A block is the smallest thing that is read, computed and written at once: a whole tensor, one
expert of a stack, or, for methods that act on each element alone, a run of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moemerge.architectures.architecture import Architecture
from moemerge.architectures.roles import Slot, Unit
from moemerge.checkpoint import Checkpoint, TensorInfo
from moemerge.config.parameters import StatisticsKind
from moemerge.merging.method import MergeMethod

if TYPE_CHECKING:
    from moemerge.statistics.file import Statistics

Prepare = Callable[[Sequence[Tensor]], list[Tensor]]


class Fate(StrEnum):
    """What becomes of an input tensor."""

    MERGED = "merged"
    COPIED = "copied"
    DROPPED = "dropped"


@dataclass(frozen=True)
class InputModel:
    """One opened model of the merge."""

    name: str
    checkpoint: Checkpoint
    architecture: Architecture


@dataclass(frozen=True)
class Source:
    """Where one model keeps a unit. `params` are the method's for this model and unit."""

    model: int  # position in MergePlan.models
    tensor: str
    slot: Slot
    params: Any = None
    statistics: str | None = None  # the unit's key in this model's statistics, where they count


@dataclass(frozen=True)
class UnitMerge:
    """One call of a method. `base` is apart from `inputs`, or absent."""

    unit: Unit
    method: MergeMethod
    options: Any
    inputs: tuple[Source, ...]
    base: Source | None
    # Brings tensors of unlike vocabularies to one shape; gets the inputs, then the base.
    prepare: Prepare | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
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
    copy: Source | None = None
    must_equal: tuple[Source, ...] = ()  # integer tensors: the other models' must agree

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def working_bytes(self) -> int:
        """Memory that computing this block takes: float32 inputs, and a few temporaries."""
        if not self.merges:
            return 8 * self.numel * (1 + len(self.must_equal))
        widest = max(len(m.sources) for m in self.merges)
        statistics = max(m.statistics_bytes for m in self.merges)
        return 4 * self.numel * (2 * widest + TEMPORARIES) + statistics


# Result, task-vector sum, mask and magnitudes: what the methods hold beside their inputs.
TEMPORARIES = 4


@dataclass(frozen=True)
class Account:
    """What becomes of one input tensor, and why (empty for the ordinary case)."""

    model: str
    tensor: str
    fate: Fate
    reason: str = ""


@dataclass(frozen=True)
class MergePlan:
    """All of a merge."""

    models: tuple[InputModel, ...]
    tensors: tuple[TensorInfo, ...]  # of the output, in writing order
    blocks: tuple[Block, ...]
    accounts: tuple[Account, ...]
    input_dtype: torch.dtype | None  # the config's `dtype`: inputs are cast to it first
    seed: int
    notices: tuple[str, ...] = ()
    # By the model's position; empty while they are still to be computed.
    statistics: Mapping[tuple[int, StatisticsKind], Statistics] = field(default_factory=dict)

    @property
    def bytes_written(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @property
    def bytes_read(self) -> int:
        files = {s.path for s in self.statistics.values()}
        weights = sum(m.checkpoint.total_bytes for m in self.models)
        return weights + sum(path.stat().st_size for path in files)

    @property
    def peak_block_bytes(self) -> int:
        return max((b.working_bytes for b in self.blocks), default=0)
