"""Words for the parts of a checkpoint: what a tensor is for, and what a merge acts on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Role(StrEnum):
    """What a tensor does in the model. Filters in a config may name it: `role:router`."""

    ROUTER = "router"  # the matrix W of z = W x, and what else feeds the logits
    ROUTER_BIAS = "router_bias"  # added to the logits (gpt_oss)
    SELECTION_BIAS = "selection_bias"  # moves the choice of experts, never the probabilities
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    MLP = "mlp"  # dense feed-forward
    ATTENTION = "attention"  # attention, linear attention, state-space mixers
    NORM = "norm"
    EMBEDDING = "embedding"
    HEAD = "head"
    OTHER = "other"


ROUTING_ROLES = frozenset({Role.ROUTER, Role.ROUTER_BIAS, Role.SELECTION_BIAS})


@dataclass(frozen=True)
class Part:
    """A regular part of one axis: gate or up inside a fused gate_up, halved or interleaved."""

    axis: int
    start: int
    stop: int
    step: int = 1


@dataclass(frozen=True)
class Slot:
    """Where a unit lies in its stored tensor.

    `rows` is the contiguous range of the leading axis that must be read (None: all of it);
    `take` and `put` then work on that block alone, so a stack is never held whole.
    """

    rows: tuple[int, int] | None = None
    squeeze: bool = False  # the rows are one expert of a stack: drop the leading axis
    part: Part | None = None  # counted after the squeeze
    transposed: bool = False  # stored (in, out); units are always (out, in)

    @property
    def covers_block(self) -> bool:
        """Whether the unit is the whole block as it is stored (but for the leading axis)."""
        return self.part is None and not self.transposed

    def take(self, block: Tensor) -> Tensor:
        """The unit as a view of `block` (the rows of the stored tensor), as (out, in)."""
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
    """What a merge method acts on: a whole tensor, or one expert's one projection in a stack."""

    key: str  # the same in every on-disk layout: pairs inputs with each other, seeds randomness
    tensor: str  # the stored tensor it lies in
    slot: Slot
    shape: tuple[int, ...]  # canonical, (out, in) for matrices
    role: Role
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None  # gate, up, down, ...

    @property
    def names(self) -> tuple[str, ...]:
        """The names a config's filter is compared with."""
        return (self.tensor,) if self.key == self.tensor else (self.tensor, self.key)
