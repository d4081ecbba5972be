"""A model with some tensors of another: its routers, say, without a file being written."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

from moemerge.architectures.opened import OpenModel
from moemerge.architectures.roles import ROUTING_ROLES
from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError

if TYPE_CHECKING:
    from torch import Tensor


class OverlaidCheckpoint(Checkpoint):
    """A checkpoint, some tensors of which come from elsewhere: another one, or memory.

    It shares the files of its base, and so has nothing of its own to close.
    """

    def __init__(self, base: Checkpoint, overlay: Mapping[str, Callable[[], Tensor]]) -> None:
        self.path = base.path
        self.label = base.label
        self.config = base.config
        self.files, self._file_of = base.files, base._file_of
        self.tensors, self.quantisation = base.tensors, base.quantisation
        self._base = base
        self._overlay = overlay

    def read(
        self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        if name not in self._overlay:
            return self._base.read(name, rows, out)
        info = self.tensors[name]
        block = self._overlay[name]().to(info.dtype.torch).reshape(info.shape)
        if rows is not None:
            block = block[rows[0] : rows[1]]
        return block.clone() if out is None else out.copy_(block)

    def close(self) -> None: ...


def routing_tensors(model: OpenModel, layers: Collection[int] | None = None) -> dict[str, str]:
    """Key -> name on disk of all that decides routing: matrices, biases, scales, tables.

    Layers that a model never runs (multi-token prediction) are left out.
    """
    names = {}
    for name in model.checkpoint.tensors:
        layer = model.architecture.layer_of(name)
        if layer is None or layer >= model.architecture.num_layers:
            continue
        if layers is not None and layer not in layers:
            continue
        if model.architecture.role(name) in ROUTING_ROLES:
            names[model.architecture.key(name)] = name
    return names


def pair_routing(
    model: OpenModel, donor: OpenModel, layers: Collection[int] | None = None
) -> dict[str, str]:
    """Name in `model` -> name in `donor` of every tensor of the routers; all must fit."""
    ours, theirs = routing_tensors(model, layers), routing_tensors(donor, layers)
    for has, lacks, keys in (
        (model, donor, ours.keys() - theirs.keys()),
        (donor, model, theirs.keys() - ours.keys()),
    ):
        if keys:
            raise ArchitectureError(
                f"{has.label} has {min(keys)}, {lacks.label} has not: their routers differ in kind",
                hint="both must be of one family, with the same layers and experts",
            )
    for key, name in ours.items():
        mine = model.checkpoint.tensors[name]
        other = donor.checkpoint.tensors[theirs[key]]
        # (1, experts) and (experts,) are the same bias.
        if math.prod(mine.shape) != math.prod(other.shape) or mine.shape[-1:] != other.shape[-1:]:
            raise ArchitectureError(
                f"{name} is {list(mine.shape)} in {model.label} and {list(other.shape)} in "
                f"{donor.label}",
                hint="both must have the same experts and the same width",
            )
    return {name: theirs[key] for key, name in ours.items()}


def with_routers_of(
    model: OpenModel, donor: OpenModel, layers: Collection[int] | None = None
) -> OpenModel:
    """`model` as it would be with the routers of `donor`; nothing is written."""
    names = pair_routing(model, donor, layers)
    overlay = {name: partial(donor.checkpoint.read, other) for name, other in names.items()}
    checkpoint = OverlaidCheckpoint(model.checkpoint, overlay)
    checkpoint.label = f"{model.label} with the routers of {donor.label}"
    return OpenModel(model.name, checkpoint, model.architecture)
