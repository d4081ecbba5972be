"""Roles of tensors, and the units that a merge acts on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Role(StrEnum):
    """The role of a tensor in the model. Filters in a config can use it: `role:router`."""

    ROUTER = "router"  # the matrix W of z = W x, and other inputs of the logits
    ROUTER_BIAS = "router_bias"  # added to the logits (gpt_oss)
    SELECTION_BIAS = "selection_bias"  # changes the choice of experts, not the probabilities
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    MLP = "mlp"  # dense feed-forward
    ATTENTION = "attention"  # attention, linear attention, state-space mixers
    NORM = "norm"
    EMBEDDING = "embedding"
    HEAD = "head"
    OTHER = "other"

    __hash__ = str.__hash__  # faster than Enum's


ROUTING_ROLES = frozenset({Role.ROUTER, Role.ROUTER_BIAS, Role.SELECTION_BIAS})


@dataclass(frozen=True)
class AxisPart:
    """A regular part of one axis: gate or up inside a fused gate_up, halved or interleaved."""

    axis: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True)
class Slot:
    """The position of a unit in its stored tensor.

    `rows` is the contiguous range of the leading axis that must be read (None: all of it). `take`
    works on that block alone, so a whole stack is never in memory.
    """

    rows: tuple[int, int] | None = None
    squeeze: bool = False  # the rows are one expert of a stack: drop the leading axis
    part: AxisPart | None = None  # axes are numbered after the squeeze
    transposed: bool = False  # stored (in, out); units are always (out, in)

    @property
    def covers_block(self) -> bool:
        """Return whether the unit is the whole stored block (except for the leading axis)."""
        return self.part is None and not self.transposed

    def take(self, block: Tensor) -> Tensor:
        """Return the unit as an (out, in) view of `block`, the rows of the stored tensor."""
        view = block.squeeze(0) if self.squeeze else block
        if self.part is not None:
            p = self.part
            index = [slice(None)] * view.dim()
            index[p.axis] = slice(p.start, p.stop, p.step)
            view = view[tuple(index)]
        return view.transpose(-1, -2) if self.transposed else view


WHOLE = Slot()


@dataclass(frozen=True)
class Unit:
    """The unit of a merge: a whole tensor, or one expert's one projection in a stack."""

    key: str  # the same in every on-disk layout; pairs inputs and seeds random methods
    tensor: str  # the stored tensor that contains it
    slot: Slot
    shape: tuple[int, ...]  # canonical, (out, in) for matrices
    role: Role
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None  # gate, up, down, ...

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that a config's filters match."""
        return (self.tensor,) if self.key == self.tensor else (self.tensor, self.key)
