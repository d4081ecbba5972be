"""The plan of a refit: which maps of the model are refitted, and where each is stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.quantised.tensor import QuantisedInfo, Rounding
from moemerge.checkpoint.requantise import round_trip
from moemerge.config.repair_settings import Part
from moemerge.errors import ArchitectureError
from moemerge.families.architecture import RouterInfo
from moemerge.families.roles import Role, Unit
from moemerge.forward.input_hooks import (
    ExpertsHook,
    InputHook,
    InputHooks,
    LinearHook,
    UnitMap,
    projections,
)
from moemerge.forward.loading import NameMap
from moemerge.forward.routers import Anatomy, RouterModule
from moemerge.repairs.lockstep.models import PairedRouter
from moemerge.repairs.refitting.least_squares import Quantise
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
    """A router: its module, with names in memory, and its names on disk."""

    module: RouterModule
    info: RouterInfo

    @property
    def names(self) -> dict[str, str]:
        """The names in memory of weight and bias, and those on disk."""
        pairs = ((self.module.weight, self.info.weight), (self.module.bias, self.info.bias))
        return {here: there for here, there in pairs if here is not None and there is not None}


@dataclass(frozen=True)
class LayerPlan:
    """The maps of one decoder layer to refit, by module path."""

    number: int
    path: str
    linear: Mapping[str, LinearHook] = field(default_factory=dict)
    experts: Mapping[str, ExpertsHook] = field(default_factory=dict)
    routers: Mapping[str, RouterMap] = field(default_factory=dict)
    gates: tuple[str, ...] = ()  # maps with one output: they may scale a shared expert
    writers: tuple[str, ...] = ()  # modules that may write to the hidden state

    @property
    def pauses(self) -> tuple[str, ...]:
        return (*self.linear, *self.experts, *self.routers)

    def without_maps(self) -> LayerPlan:
        """Return the plan of the same layer with nothing to refit."""
        return replace(self, linear={}, experts={}, routers={})


@dataclass(frozen=True)
class RefitPlan:
    """Every map to refit."""

    layers: tuple[LayerPlan, ...]
    head: LinearHook | None
    notices: tuple[str, ...]


def make_plan(
    anatomy: Anatomy,
    hooks: InputHooks,
    units: UnitMap,
    routers: Mapping[str, PairedRouter],
    *,
    layers: Collection[int],
    parts: Collection[Part],
) -> RefitPlan:
    """Sort the input hooks of every layer by purpose; refuse experts that cannot be read.

    `routers` are the routers to refit, by their weight on disk.
    """
    if "experts" in parts:
        _require_experts(units, hooks)
    notices: list[str] = []
    planned = tuple(
        _layer(anatomy, number, hooks.layers[number], units, routers, parts, notices)
        if number in layers
        else LayerPlan(number, anatomy.layers[number])
        for number in range(len(anatomy.layers))
    )
    head = hooks.head if "head" in parts and len(layers) == len(anatomy.layers) else None
    if "head" in parts and hooks.head is None:
        notices.append(
            "the head shares its matrix with the embedding, so it keeps its merged weights"
        )
    elif "head" in parts and head is None:
        notices.append("the head keeps its merged weights, since not all layers are refitted")
    return RefitPlan(planned, head, tuple(dict.fromkeys(notices)))


def _require_experts(units: UnitMap, hooks: InputHooks) -> None:
    try:
        units.require_experts(hooks)
    except ArchitectureError as error:
        raise ArchitectureError(
            f"{error.message}, so they cannot be refitted",
            hint='`parts="router,attention"` refits what can be',
        ) from None


def _layer(
    anatomy: Anatomy,
    number: int,
    hooks: Sequence[InputHook],
    units: UnitMap,
    routers: Mapping[str, PairedRouter],
    parts: Collection[Part],
    notices: list[str],
) -> LayerPlan:
    """Return the plan of a layer: the maps of the requested parts that can be refitted."""
    linear: dict[str, LinearHook] = {}
    writers: list[str] = []
    gates: list[str] = []
    stops = {}
    for router in anatomy.routers:
        stored = units.stored_as(router.weight)
        if router.layer == number and stored is not None and stored in routers:
            stops[router.path] = RouterMap(router, routers[stored].info)
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
    return LayerPlan(
        number,
        anatomy.layers[number],
        linear,
        experts if "experts" in parts else {},
        stops,
        tuple(gates),
        (*writers, *experts),
    )


def planned_names(plan: RefitPlan, units: UnitMap) -> set[str]:
    """Return the names of the stored tensors that will change."""
    linear = [hook for layer in plan.layers for hook in layer.linear.values()]
    linear += [] if plan.head is None else [plan.head]
    names = {placed.unit.tensor for hook in linear for placed in units.linear(hook)}
    for layer in plan.layers:
        for hook in layer.experts.values():
            names |= {unit.tensor for unit in units.experts(hook).values()}
        for router in layer.routers.values():
            names |= {n for n in (router.info.weight, router.info.bias) if n is not None}
    return names


# --- from memory to disk ------------------------------------------------------------------------


# A unit, and its part of the matrix in memory as a view.
UnitPart = tuple[Unit, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Storage:
    """Where the maps of a model are stored, and in which formats.

    With `same`, new weights are quantised before the next map is fitted.
    """

    checkpoint: Checkpoint
    units: UnitMap
    names: NameMap
    same: bool

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype on disk of a parameter, by its name in memory."""
        return self.checkpoint.tensors[self.names.recipes[name].sources[0][1]].dtype.torch

    def linear(self, hook: LinearHook) -> list[UnitPart]:
        return [(one.unit, one.take) for one in self.units.linear(hook)]

    def experts(self, hook: ExpertsHook, module: Any) -> dict[tuple[str, int], list[UnitPart]]:
        """Return the units of the projections `up` (with gate) and `down` of every expert."""
        units = self.units.experts(hook)
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

        `begun` are the tensors that maps were written into, by name.
        """
        matrix = to_host(matrix)
        for unit, take in parts:
            block = self._block(unit, begun)
            rows = unit.slot.rows
            target = block if rows is None else block[rows[0] : rows[1]]
            unit.slot.take(target).copy_(take(matrix))

    def _block(self, unit: Unit, begun: dict[str, Tensor]) -> Tensor:
        """Return the stored tensor of a unit, with merged values until its units are written."""
        if unit.tensor not in begun:
            info = self.checkpoint.tensors[unit.tensor]
            whole = unit.slot.covers_block and unit.slot.rows is None
            begun[unit.tensor] = (
                torch.empty(info.shape, dtype=info.dtype.torch)
                if whole
                else self.checkpoint.read(unit.tensor)
            )
        return begun[unit.tensor]

    def quantise(self, parts: Sequence[UnitPart]) -> Quantise | None:
        """Return None if a part is not quantised, or shares blocks of scales with other maps.

        Such tensors are rounded when they are written.
        """
        infos = [self.checkpoint.tensors[unit.tensor] for unit, _ in parts]
        if not self.same or not parts:
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
                    blocks[place] = self.checkpoint.read(unit.tensor, unit.slot.rows)
                unit.slot.take(blocks[place]).copy_(take(matrix))
            for (name, row), block in blocks.items():
                info = self.checkpoint.tensors[name]
                assert isinstance(info, QuantisedInfo)
                blocks[name, row] = round_trip(info, self.checkpoint, block, row, rounding)
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
