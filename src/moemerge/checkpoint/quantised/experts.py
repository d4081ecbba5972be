"""Experts that are stored one by one where the model has them in stacks.

Llama-4 in compressed-tensors has three matrices an expert, since only matrices are quantised there;
in floats transformers knows stacks (experts, in, out) alone, gate and up side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moemerge.checkpoint.quantised.tensor import Fetch, QuantisedInfo, Rounding, Rows, Written
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_STACKING: Final = frozenset({"llama4", "llama4_text"})
_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACKS: Final = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


@dataclass(frozen=True)
class QuantisedExperts(QuantisedInfo):
    """A stack (experts, in, out) of matrices that are stored on their own."""

    members: tuple[tuple[QuantisedInfo, ...], ...] = ()  # of each expert, side by side

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        return tuple(part for expert in self.members for one in expert for part in one.parts)

    @property
    def kept(self) -> tuple[TensorInfo, ...]:
        return tuple(part for expert in self.members for one in expert for part in one.kept)

    def read(self, fetch: Fetch, rows: Rows | None, out: Tensor | None = None) -> Tensor:
        shape = self.block_shape(rows)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype.torch)
        for one, view in self._views(out, 0 if rows is None else rows[0]):
            view.copy_(one.read(fetch, None))
        return out

    def encode(
        self, fetch: Fetch, block: Tensor, row: int, rounding: Rounding
    ) -> Iterator[Written]:
        for one, view in self._views(block, row):
            yield from one.encode(fetch, view, 0, rounding)

    def _views(self, block: Tensor, row: int) -> Iterator[tuple[QuantisedInfo, Tensor]]:
        """Every stored matrix of these experts, and its place in the block as (out, in)."""
        for stacked, expert in zip(block, self.members[row:], strict=False):
            widths = [one.shape[0] for one in expert]
            for one, part in zip(expert, stacked.split(widths, dim=1), strict=True):
                yield one, part.T


def stack_experts(
    config: Mapping[str, Any], units: Mapping[str, QuantisedInfo]
) -> dict[str, QuantisedInfo]:
    """The units, with experts in stacks where the model has them so."""
    text = config.get("text_config")
    types = {
        config.get("model_type"),
        text.get("model_type") if isinstance(text, Mapping) else None,
    }
    if not types & _STACKING:
        return dict(units)
    experts: dict[tuple[str, str], dict[int, QuantisedInfo]] = {}
    rest = {}
    for name, unit in units.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            rest[name] = unit
        else:
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = unit
    for owner in dict.fromkeys(owner for owner, _ in experts):
        for name, projections in _STACKS.items():
            stacks = [experts.get((owner, projection), {}) for projection in projections]
            stack = _stack(f"{owner}.{name}", stacks)
            rest[stack.name] = stack
    return rest


def _stack(name: str, stacks: list[dict[int, QuantisedInfo]]) -> QuantisedExperts:
    count = len(stacks[0])
    shapes = {unit.shape for stack in stacks for unit in stack.values()}
    if not count or any(set(stack) != set(range(count)) for stack in stacks) or len(shapes) != 1:
        raise CheckpointError(
            f"the experts of {name!r} are {[len(stack) for stack in stacks]} matrices of shapes "
            f"{sorted(map(list, shapes))}, expected the same of each",
            hint="an expert is missing: its download is incomplete",
        )
    members = tuple(tuple(stack[expert] for stack in stacks) for expert in range(count))
    first = members[0][0]
    rows, columns = first.shape
    plain = TensorInfo.of(name, first.dtype, (count, columns, rows * len(stacks)))
    return QuantisedExperts(
        name,
        first.dtype,
        plain.shape,
        plain.nbytes,
        first.scheme,
        first.codes,
        first.scales,
        stacked=True,
        transposed=True,
        members=members,
    )
