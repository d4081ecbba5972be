"""Which maps of a layer are refitted, and where each is stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.quantised.tensor import QuantisedInfo, Rounding
from moemerge.checkpoint.requantise import round_trip
from moemerge.config.repair_settings import Part
from moemerge.errors import ArchitectureError
from moemerge.families.roles import Role, Unit
from moemerge.forward.input_hooks import ExpertsHook, LinearHook, UnitMap, projections
from moemerge.forward.routers import RouterModule
from moemerge.forward.stream import ModelStream
from moemerge.repairs.least_squares import Quantise
from moemerge.repairs.routers import PairedRouter
from moemerge.runtime.gpu import to_host

_NUMBER = re.compile(r"\.\d+\.")
# Gates of shared experts have one output: they scale an output and keep their merged weights.
GATE_OUTPUTS = 1
PART_OF_ROLE: Mapping[Role, Part] = {
    Role.ATTENTION: "attention",
    Role.EXPERT: "experts",
    Role.SHARED_EXPERT: "experts",
    Role.MLP: "experts",
    Role.ROUTER: "router",
    Role.HEAD: "head",
}


@dataclass(frozen=True)
class RouterMap:
    """A router: its module, with names in memory, and its counterparts on disk."""

    module: RouterModule
    pair: PairedRouter

    @property
    def names(self) -> dict[str, str]:
        """The names in memory of weight and bias, and those on disk."""
        info = self.pair.info
        pairs = ((self.module.weight, info.weight), (self.module.bias, info.bias))
        return {here: there for here, there in pairs if here is not None and there is not None}


@dataclass(frozen=True)
class LayerMaps:
    """The maps of one decoder layer to refit, by module path."""

    linear: Mapping[str, LinearHook] = field(default_factory=dict)
    experts: Mapping[str, ExpertsHook] = field(default_factory=dict)
    routers: Mapping[str, RouterMap] = field(default_factory=dict)
    gates: tuple[str, ...] = ()  # maps with one output: they may scale a shared expert
    writers: tuple[str, ...] = ()  # modules that may write to the hidden state

    @property
    def paths(self) -> tuple[str, ...]:
        return (*self.linear, *self.experts, *self.routers)


def layer_maps(
    stream: ModelStream,
    number: int,
    units: UnitMap,
    routers: Mapping[str, PairedRouter],
    parts: Collection[Part],
) -> tuple[LayerMaps, list[str]]:
    """Sort the input hooks of a layer by purpose, and return notices about other matrices.

    `routers` are the routers to refit, by their weight on disk.
    """
    linear: dict[str, LinearHook] = {}
    writers: list[str] = []
    gates: list[str] = []
    notices: list[str] = []
    stops = {}
    for router in stream.anatomy.routers:
        stored = units.stored_as(router.weight)
        if router.layer == number and stored is not None and stored in routers:
            stops[router.path] = RouterMap(router, routers[stored])
    hooks = stream.input_hooks.layers[number]
    for hook in hooks:
        if isinstance(hook, ExpertsHook) or hook.router or hook.path in stops:
            continue
        if hook.shape[0] == GATE_OUTPUTS:
            gates.append(hook.path)
            continue
        writers.append(hook.path)
        placed = units.linear(hook)
        part = PART_OF_ROLE.get(placed[0].unit.role) if placed else None
        if part in parts and part != "router":
            linear[hook.path] = hook
        if not placed:
            kind = _NUMBER.sub(".N.", hook.weight)
            notices.append(f"{kind} is stored in parts: it keeps its merged weights")
    experts = {hook.path: hook for hook in hooks if isinstance(hook, ExpertsHook)}
    fitted = experts if "experts" in parts else {}
    return LayerMaps(linear, fitted, stops, tuple(gates), (*writers, *experts)), notices


def require_experts(units: UnitMap, stream: ModelStream) -> None:
    """Refuse experts whose inputs cannot be separated."""
    try:
        units.require_experts(stream.input_hooks)
    except ArchitectureError as error:
        raise ArchitectureError(
            f"{error.message}, so they cannot be refitted",
            hint='`parts="router,attention"` refits what can be',
        ) from None


# A unit, and its part of the matrix in memory as a view.
UnitPart = tuple[Unit, Callable[[Tensor], Tensor]]


class Storage:
    """Where the maps of a model are stored, and in which formats.

    With `same`, new weights are quantised before the next map is fitted.
    """

    def __init__(
        self, checkpoint: Checkpoint, stream: ModelStream, units: UnitMap, *, same: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._names = stream.names
        self._units = units
        self._same = same

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype on disk of a parameter, by its name in memory."""
        return self._checkpoint.tensors[self._names.recipes[name].sources[0][1]].dtype.torch

    def linear(self, hook: LinearHook) -> list[UnitPart]:
        return [(one.unit, one.take) for one in self._units.linear(hook)]

    def experts(self, hook: ExpertsHook, module: Any) -> dict[tuple[str, int], list[UnitPart]]:
        """Return the units of the projections `up` (with gate) and `down` of every expert."""
        units = self._units.experts(hook)
        takes: dict[str, dict[str | None, Callable[[Tensor], Tensor]]] = {
            "up": {None: _whole, **{name: _projection(module, name) for name in ("gate", "up")}},
            "down": {"down": _whole},
        }
        return {
            (which, expert): [
                (units[expert, name], take)
                for name, take in takes[which].items()
                if (expert, name) in units
            ]
            for expert in range(hook.count)
            for which in takes
        }

    def write(self, parts: Sequence[UnitPart], matrix: Tensor, begun: dict[str, Tensor]) -> None:
        """Write a matrix from memory into the stored tensors of its units.

        `begun` are the tensors that maps were written into, by name. They have merged values until
        their units are written.
        """
        matrix = to_host(matrix)
        for unit, take in parts:
            if unit.tensor not in begun:
                info = self._checkpoint.tensors[unit.tensor]
                whole = unit.slot.covers_block and unit.slot.rows is None
                begun[unit.tensor] = (
                    torch.empty(info.shape, dtype=info.dtype.torch)
                    if whole
                    else self._checkpoint.read(unit.tensor)
                )
            block, rows = begun[unit.tensor], unit.slot.rows
            target = block if rows is None else block[rows[0] : rows[1]]
            unit.slot.take(target).copy_(take(matrix))

    def quantise(self, parts: Sequence[UnitPart]) -> Quantise | None:
        """Return None if a part is not quantised, or shares blocks of scales with other maps.

        Such tensors are rounded when they are written.
        """
        infos = [self._checkpoint.tensors[unit.tensor] for unit, _ in parts]
        if not self._same or not parts:
            return None
        for (unit, _), info in zip(parts, infos, strict=True):
            rows = unit.slot.rows or (0, info.rows)
            if not isinstance(info, QuantisedInfo) or not info.holds_whole(rows):
                return None

        def quantise(weight: Tensor) -> tuple[Tensor, str, Rounding]:
            matrix, rounding = to_host(weight).clone(), Rounding()
            blocks: dict[tuple[str, int], Tensor] = {}
            for unit, take in parts:
                place = _place(unit)
                if place not in blocks:  # values of other units in these rows stay
                    blocks[place] = self._checkpoint.read(unit.tensor, unit.slot.rows)
                unit.slot.take(blocks[place]).copy_(take(matrix))
            for (name, row), block in blocks.items():
                info = self._checkpoint.tensors[name]
                assert isinstance(info, QuantisedInfo)
                blocks[name, row] = round_trip(info, self._checkpoint, block, row, rounding)
            for unit, take in parts:
                take(matrix).copy_(unit.slot.take(blocks[_place(unit)]))
            return matrix.to(weight.device), infos[0].stored_as, rounding

        return quantise


def _place(unit: Unit) -> tuple[str, int]:
    return unit.tensor, 0 if unit.slot.rows is None else unit.slot.rows[0]


def _whole(matrix: Tensor) -> Tensor:
    return matrix


def _projection(module: Any, name: str) -> Callable[[Tensor], Tensor]:
    return lambda matrix: projections(module, matrix)[name]
