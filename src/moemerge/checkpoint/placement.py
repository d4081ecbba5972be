"""Where a parameter of the model in memory lies on disk.

An adapter names parameters as the model in memory does (`mlp.experts.gate_up_proj`, a stack); a
checkpoint may store them one expert at a time, or the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moemerge.checkpoint.tensors import TensorInfo


@dataclass(frozen=True)
class Place:
    """A matrix in a stored tensor: all of it, or one row of a stack, or a part of either.

    `part` cuts the output axis, `transposed` says that the matrix is stored (in, out); None
    leaves that to the shapes.
    """

    tensor: str
    row: int | None = None
    part: slice | None = None
    transposed: bool | None = None


# (parameter in memory, expert or None) -> its places on disk, which share its output axis evenly
# in this order; an empty answer leaves the parameter to the built-in rules below.
Expand = Callable[[str, int | None], Sequence[Place]]

# A stacked parameter and the names of its matrices where every expert is stored on its own.
_SPLITS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w3",)),
    "down_proj": (("down_proj",), ("w2",)),
}
_EXPERT: Final = re.compile(r"(?P<owner>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>\w+)\.weight")


def find_places(
    parameter: str, expert: int | None, out_features: int, tensors: Mapping[str, TensorInfo]
) -> Sequence[Place]:
    """The places of a matrix (`expert` None) or of one expert's matrix in a stacked parameter."""
    for name in _aliases(parameter):
        if name in tensors:
            return [Place(name, row=expert)]
        if expert is None:
            found = _one_expert(name, out_features, tensors)
        else:
            found = _split(name, expert, tensors)
        if found:
            return found
    return []


def _aliases(parameter: str) -> list[str]:
    """The same parameter under names that checkpoints of the same model use."""
    names = [parameter, parameter.removeprefix("model."), f"model.{parameter}"]
    names += [name.replace(".mlp.", ".block_sparse_moe.") for name in names]
    return list(dict.fromkeys(names))


def _split(name: str, expert: int, tensors: Mapping[str, TensorInfo]) -> Sequence[Place]:
    """A stacked parameter in memory, one tensor per expert and projection on disk."""
    owner, _, stack = name.rpartition(".")
    for matrices in _SPLITS.get(stack, ()):
        names = [f"{owner}.{expert}.{matrix}.weight" for matrix in matrices]
        if all(n in tensors for n in names):
            return [Place(n) for n in names]
    return []


def _one_expert(name: str, out_features: int, tensors: Mapping[str, TensorInfo]) -> Sequence[Place]:
    """One expert's matrix in memory, a stack on disk."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return []
    expert = int(match["expert"])
    for stack, splits in _SPLITS.items():
        info = tensors.get(f"{match['owner']}.{stack}")
        for matrices in splits:
            if info is None or match["matrix"] not in matrices or len(info.shape) != 3:
                continue
            if expert >= info.shape[0]:
                return []
            start = matrices.index(match["matrix"]) * out_features
            part = None if len(matrices) == 1 else slice(start, start + out_features)
            return [Place(info.name, expert, part)]
    return []
