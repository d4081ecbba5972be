"""Load a model for training, and convert its trained weights back to the stored layout.

transformers keeps experts in stacks, whatever the checkpoint's layout. Units have the same keys in
every layout, which pair trained weights with stored tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moemerge.errors import ArchitectureError, NumericalError
from moemerge.families.opened import OpenModel
from moemerge.families.roles import Role, Unit
from moemerge.forward.loading import build_skeleton, loaded_architecture
from moemerge.forward.routers import anatomy, require_logits
from moemerge.forward.weights import Weights

CPU = torch.device("cpu")
# The roles that each part of a model consists of.
PART_ROLES: Mapping[str, frozenset[Role]] = {
    "routers": frozenset({Role.ROUTER, Role.ROUTER_BIAS}),
    "experts": frozenset({Role.EXPERT, Role.SHARED_EXPERT}),
    "attention": frozenset({Role.ATTENTION}),
}
# A selection bias has no gradient: families update it by other means.
UNTRAINED = frozenset({Role.SELECTION_BIAS})
# The roles whose matrices get low-rank adapters.
ADAPTED = frozenset({Role.ATTENTION, Role.EXPERT, Role.SHARED_EXPERT, Role.MLP, Role.ROUTER})


class TrainedLayout:
    """The trained parameters of a model, and the stored tensors they belong to.

    It is made from headers alone, and refuses parameters that cannot be written back. With
    `adapted`, only the matrices that low-rank adapters can change are trained; with `layers`, only
    tensors of these layers.
    """

    def __init__(
        self,
        opened: OpenModel,
        only: str | None,
        *,
        adapted: bool = False,
        layers: Collection[int] | None = None,
    ) -> None:
        self._opened = opened
        skeleton, self.in_memory = loaded_architecture(opened.checkpoint)
        require_logits(skeleton, opened.label)
        wanted = frozenset(Role) - UNTRAINED if only is None else PART_ROLES[only]
        if adapted:
            wanted &= ADAPTED
        parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        self.trained: frozenset[str] = frozenset(
            name
            for name, value in parameters.items()
            if value.is_floating_point()
            and self.in_memory.role(name) in wanted
            and not (adapted and not self._has_matrices(name, value))
            and (layers is None or self.in_memory.layer_of(name) in layers)
        )
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(value.shape)
            for name, value in skeleton.named_parameters()
            if name in self.trained
        }
        self.numel = sum(map(math.prod, self.shapes.values()))
        if not self.trained:
            raise ArchitectureError(
                f"{opened.label} has no {only or 'parameters'} to train",
                hint="without `only` the whole model is trained",
            )
        self._check_places(parameters)

    def _has_matrices(self, name: str, value: Tensor) -> bool:
        """Return whether a parameter is a matrix or a stack of them.

        The biases of stacked experts are (experts, outputs), and no matrix.
        """
        if any(len(unit.shape) < 2 for unit in self.in_memory.units(name)):
            return False
        return min(value.shape[-2:]) > 1

    @cached_property
    def _moves(self) -> Mapping[str, list[tuple[Unit, Unit]]]:
        """Return the units of each stored tensor, each in memory and as stored."""
        here = {unit.key: unit for name in self.trained for unit in self.in_memory.units(name)}
        moves: dict[str, list[tuple[Unit, Unit]]] = {}
        for name in self._opened.checkpoint.tensors:
            for unit in self._opened.architecture.units(name):
                if (own := here.get(unit.key)) is not None and own.shape == unit.shape:
                    moves.setdefault(name, []).append((own, unit))
        return moves

    @property
    def stored(self) -> Collection[str]:
        """The stored tensors that training changes."""
        return self._moves.keys()

    @cached_property
    def stored_dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype in which each parameter is stored; of a stack of several, the narrowest."""
        dtypes: dict[str, torch.dtype] = {}
        for name, moves in self._moves.items():
            own = self._opened.checkpoint.tensors[name].dtype.torch
            for here, _ in moves:
                known = dtypes.setdefault(here.tensor, own)
                dtypes[here.tensor] = min(known, own, key=lambda dtype: dtype.itemsize)
        return dtypes

    def _check_places(self, parameters: Mapping[str, Tensor]) -> None:
        reached = {here.key for moves in self._moves.values() for here, _ in moves}
        # The second name of a tied parameter is not stored.
        trained = {id(p) for name, p in parameters.items() if self._reaches(name, reached)}
        lost = [name for name in sorted(self.trained) if id(parameters[name]) not in trained]
        if lost:
            raise ArchitectureError(
                f"{self._opened.label}: {lost[0]} has no counterpart in the stored tensors "
                f"({len(lost)} such), so what is trained could not be written back",
                hint="save the model by transformers' save_pretrained first, and use that folder",
            )

    def _reaches(self, name: str, reached: Collection[str]) -> bool:
        return name in self.trained and all(
            unit.key in reached for unit in self.in_memory.units(name)
        )

    def written(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield stored tensors with the trained values; `state` is the model's state dict."""
        checkpoint = self._opened.checkpoint
        # torch reuses freed pinned memory, and copies to it at the bus's full speed.
        pinned = any(value.is_cuda for value in state.values())
        for name, moves in self._moves.items():
            info = checkpoint.tensors[name]
            whole = sum(math.prod(unit.shape) for _, unit in moves) == math.prod(info.shape)
            block = (
                torch.empty(info.shape, dtype=info.dtype.torch, pin_memory=pinned)
                if whole
                else checkpoint.read(name)
            )
            for here, unit in moves:
                trained = here.slot.take(_rows(state[here.tensor], here))
                value = trained.detach().to(block.dtype)
                if not bool(torch.isfinite(value).all()):
                    raise NumericalError(
                        f"{name} holds NaN or infinity after training (stored as {block.dtype})",
                        hint="lower the learning rate: `learning_rate=1e-5`",
                    )
                unit.slot.take(_rows(block, unit)).copy_(value)
            yield name, block


def _rows(tensor: Tensor, unit: Unit) -> Tensor:
    rows = unit.slot.rows
    return tensor if rows is None else tensor[rows[0] : rows[1]]


def load_trainable(
    opened: OpenModel,
    layout: TrainedLayout,
    dtype: torch.dtype,
    *,
    lora: bool,
    device: torch.device = CPU,
    shard: Callable[[nn.Module], None] | None = None,
) -> PreTrainedModel:
    """Load the model with its trained parameters trainable; with a LoRA none is.

    `shard` gets each layer once it is loaded, and at last the model: it may leave a part of the
    parameters in memory, so that the device never holds the whole model.
    """
    model = build_skeleton(opened.checkpoint, dtype)
    weights = Weights(model, opened.checkpoint, device, dtype)
    layers = anatomy(model).layers if shard is not None else ()
    inside = tuple(f"{path}." for path in layers)
    rest = tuple(name for name in model.state_dict() if not name.startswith(inside))
    try:
        for path in (*layers, None):
            names = rest if path is None else weights.names_under(path)
            weights.place(weights.fetch(names))
            weights.check(names, path or "the whole model")
            weights.require_finite(names)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            for name in layout.trained.intersection(names) if not lora else ():
                parameters[name].requires_grad_(True)
            if shard is not None:
                shard(model if path is None else model.get_submodule(path))
    finally:
        weights.close()
    trained: Any = model.train()
    return trained  # type: ignore[no-any-return]
