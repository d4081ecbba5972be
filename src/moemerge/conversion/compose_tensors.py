"""The tensors of a composed model: from which stored tensor each part of them is copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.checkpoint import CheckpointWriter, TensorInfo
from moemerge.conversion.compose_targets import MoeTarget
from moemerge.errors import ArchitectureError, NumericalError
from moemerge.families import names
from moemerge.families.architecture import Architecture, RouterInfo
from moemerge.families.layout import projection_of
from moemerge.families.opened import OpenModel
from moemerge.families.roles import WHOLE, Role, Slot, Unit
from moemerge.families.rules import PROJ, Score
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

COPY_BYTES = 16 * 2**20
PROJECTIONS = ("gate", "up", "down")
COMPUTED = ".rotary_emb.inv_freq"  # a buffer in old checkpoints, which models compute themselves


@dataclass(frozen=True)
class Copy:
    """A unit of an output tensor, and the stored unit that it is copied from."""

    slot: Slot
    model: OpenModel
    tensor: str
    source: Slot = WHOLE
    factor: float = 1.0

    def read(self, rows: tuple[int, int] | None = None) -> Tensor:
        stored = self.model.checkpoint.read(self.tensor, rows or self.source.rows)
        taken = stored if rows else self.source.take(stored)
        return taken if self.factor == 1.0 else taken.float() * self.factor


@dataclass(frozen=True)
class ComposedTensor:
    """An output tensor. Without copies, it is part of the routing and computed."""

    info: TensorInfo
    copies: tuple[Copy, ...] = ()

    def write(self, writer: CheckpointWriter) -> None:
        """Copy the tensor; never more than one unit or block of rows is in memory."""
        name, dtype = self.info.name, self.info.dtype.torch
        groups: dict[tuple[int, int] | None, list[Copy]] = defaultdict(list)
        for copy in self.copies:
            groups[copy.slot.rows].append(copy)
        for rows, group in groups.items():
            first = group[0]
            if first.slot == WHOLE == first.source and self.info.shape:
                step = max(1, COPY_BYTES // max(1, self.info.row_bytes))
                for row in range(0, self.info.rows, step):
                    block = first.read((row, min(row + step, self.info.rows))).to(dtype)
                    self._require_finite(block, group)
                    writer.write(name, block, row)
                continue
            block = torch.empty(self.info.block_shape(rows), dtype=dtype)
            for copy in group:
                copy.slot.take(block).copy_(copy.read())
            self._require_finite(block, group)
            writer.write(name, block, 0 if rows is None else rows[0])

    def _require_finite(self, block: Tensor, copies: Sequence[Copy]) -> None:
        if bool(torch.isfinite(block.sum(dtype=torch.float32))):
            return  # faster than a test of every value
        if not bool(torch.isfinite(block).all()):
            origin = ", ".join(f"{copy.tensor} of {copy.model.label}" for copy in copies)
            raise NumericalError(
                f"{self.info.name} would hold NaN or infinity in {self.info.dtype}, from {origin}",
                hint="use a dtype with a larger range, or another model",
            )


@dataclass(frozen=True)
class Layer:
    """A layer with experts: the prefix of its names and the stored units of the base's MLP."""

    prefix: str  # `model.layers.0`
    mlp: Mapping[str, Unit]  # by projection; the gate's shape is (width of an expert, hidden size)
    dtype: Dtype


def mlp_layers(model: OpenModel) -> dict[int, Layer]:
    """Return the gate, up and down projections of every dense layer."""
    architecture = model.architecture
    found: dict[int, dict[str, Unit]] = defaultdict(dict)
    prefixes: dict[int, str] = {}
    for name in model.checkpoint.tensors:
        place = names.split_layer(name)
        if place is None or architecture.role(name) is not Role.MLP:
            continue
        for unit in architecture.units(name):
            projection = projection_of(unit)
            if projection is None or not name.endswith(".weight"):
                raise ArchitectureError(
                    f"{model.label}: {name} is not one of an expert's three matrices (gate, up and "
                    "down), so its layer cannot become experts"
                )
            found[place.layer][projection] = unit
        prefixes[place.layer] = f"{place.wrap}{place.box}.{place.layer}"
    for number, mlp in found.items():
        if set(mlp) != set(PROJECTIONS):
            raise ArchitectureError(
                f"{model.label}: layer {number} has {', '.join(sorted(mlp))} of an MLP, expected "
                "gate, up and down"
            )
    dtypes = {n: model.checkpoint.tensors[found[n]["gate"].tensor].dtype for n in found}
    return {n: Layer(prefixes[n], found[n], dtypes[n]) for n in sorted(found)}


Source = tuple[OpenModel, Mapping[int, Layer]]  # a model and its MLPs


@dataclass(frozen=True)
class Parts:
    """The models of a composition: the base, the experts, and a shared expert with its factor."""

    base: OpenModel
    experts: tuple[OpenModel, ...]
    shared: tuple[OpenModel, float] | None = None

    @property
    def models(self) -> list[OpenModel]:
        """All models, each once."""
        every = (self.base, *self.experts, *([self.shared[0]] if self.shared else []))
        return list({id(model): model for model in every}.values())


def composed_tensors(parts: Parts, target: MoeTarget, dtype: Dtype | None) -> list[ComposedTensor]:
    """Return every tensor of a MoE: the experts' MLPs, and the rest of the base.

    Routers are last, so that few shards change when they are fitted.
    """
    base, layers = parts.base, mlp_layers(parts.base)
    if len(layers) != base.architecture.num_layers:
        raise ArchitectureError(
            f"{base.label}: {len(layers)} of {base.architecture.num_layers} layers have an MLP"
        )
    sources = {id(model): (model, mlp_layers(model)) for model in parts.models}
    tensors: list[ComposedTensor] = []
    done: set[int] = set()
    for name, info in base.checkpoint.tensors.items():
        if name.endswith(COMPUTED):
            continue
        number = base.architecture.layer_of(name)
        if number is None or base.architecture.role(name) is not Role.MLP:
            stored = dtype if dtype and info.dtype.is_floating_point else info.dtype
            made = TensorInfo.of(name, stored, info.shape)
            tensors.append(ComposedTensor(made, (Copy(WHOLE, base, name),)))
        elif number not in done:
            done.add(number)
            tensors += _of_layer(layers[number], parts, sources, target, dtype)
    return [*tensors, *_routing(layers.values(), parts, target, dtype)]


def _of_layer(
    layer: Layer,
    parts: Parts,
    sources: Mapping[int, Source],
    target: MoeTarget,
    dtype: Dtype | None,
) -> Iterator[ComposedTensor]:
    """Yield the experts of a layer, and its shared expert."""
    (place,) = target.family.experts
    made: list[tuple[str, OpenModel, Sequence[str], float]] = [
        (f"{place.root}.{number}", model, place.spelling, 1.0)
        for number, model in enumerate(parts.experts)
    ]
    if parts.shared is not None and target.shared is not None:
        made.append((target.shared.root, parts.shared[0], PROJ, parts.shared[1]))
    for root, model, spelling, factor in made:
        for projection, spelled in zip(PROJECTIONS, spelling, strict=True):
            unit = matching_unit(sources[id(model)], layer.mlp[projection], projection)
            name = f"{layer.prefix}.{root}.{spelled}.weight"
            info = TensorInfo.of(name, dtype or layer.dtype, unit.shape)
            scale = factor if projection == "down" else 1.0
            yield ComposedTensor(info, (Copy(WHOLE, model, unit.tensor, unit.slot, scale),))


def _routing(
    layers: Iterable[Layer], parts: Parts, target: MoeTarget, dtype: Dtype | None
) -> Iterator[ComposedTensor]:
    """Yield the routers, each with the gate of the layer's shared expert."""
    gate = target.shared.gate if target.shared and parts.shared else None
    wanted = {target.family.routers[0].weight: len(parts.experts), **({gate: 1} if gate else {})}
    for layer in layers:
        for name, rows in wanted.items():
            shape = (rows, layer.mlp["gate"].shape[1])
            info = TensorInfo.of(f"{layer.prefix}.{name}", dtype or layer.dtype, shape)
            yield ComposedTensor(info)


def matching_unit(source: Source, wanted: Unit, projection: str) -> Unit:
    """Return a dense model's projection in the layer of `wanted`; refuse another shape."""
    (model, own), layer = source, wanted.layer
    unit = own[layer].mlp[projection] if layer is not None and layer in own else None
    if unit is None or unit.shape != wanted.shape:
        found = "no MLP" if unit is None else f"{unit.tensor} of {list(unit.shape)}"
        raise ArchitectureError(
            f"{model.label} has {found} in layer {layer}, expected {list(wanted.shape)}",
            hint="all experts of a layer have the same size",
        )
    return unit


# --- more experts for a MoE ---------------------------------------------------------------------


def grown_tensors(
    parts: Parts, config: Mapping[str, Any], dtype: Dtype | None
) -> list[ComposedTensor]:
    """Return every tensor of a MoE base with the MLPs of dense models as further experts.

    `config` is that of the result. Routers are last and are computed.
    """
    base, architecture = parts.base, parts.base.architecture
    found = [r for r in architecture.routers() if r.layer < architecture.num_layers]
    routers = {router.layer: router for router in found}
    _require_plain(base, found)
    infos: dict[str, TensorInfo] = {}
    last: list[ComposedTensor] = []
    for name, info in base.checkpoint.tensors.items():
        layer = architecture.layer_of(name)
        if layer is not None and layer >= architecture.num_layers:
            continue
        stored = dtype if dtype and info.dtype.is_floating_point else info.dtype
        if layer in routers and name == routers[layer].weight:
            shape = (info.rows + len(parts.experts), *info.shape[1:])
            last.append(ComposedTensor(TensorInfo.of(name, stored, shape)))
        elif layer in routers and architecture.role(name) is Role.EXPERT:
            for made, shape in _grown_names(parts, name, info, routers[layer].rows):
                infos[made] = TensorInfo.of(made, stored, shape)
        else:
            infos[name] = TensorInfo.of(name, stored, info.shape)
    routing = {tensor.info.name: tensor.info for tensor in last}
    grown = Architecture.of(config, {**infos, **routing})
    sources = [(model, mlp_layers(model)) for model in parts.experts]
    tensors = [
        ComposedTensor(info, tuple(_grown_copies(parts, grown, routers, sources, info)))
        for info in infos.values()
    ]
    return [*tensors, *last]


def _require_plain(base: OpenModel, routers: Sequence[RouterInfo]) -> None:
    """Refuse routers whose further tensors or groups would also have to grow."""
    for router in routers:
        gate = router.gate
        if (
            gate is None
            or gate.score is not Score.SOFTMAX
            or gate.approximate is not None
            or gate.groups > 1
            or len({one.layer for one in routers}) != len(routers)
            or router.bias is not None
            or router.selection_bias is not None
            or router.rows != base.architecture.num_experts
        ):
            raise ArchitectureError(
                f"{base.label}: {router.weight} is not a plain softmax over the experts",
                hint=f"experts cannot be added to {base.architecture.model_type} models",
            )


def _grown_names(
    parts: Parts, name: str, info: TensorInfo, old: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of an expert's tensor, and of the same tensor of added experts."""
    architecture = parts.base.architecture
    if architecture.is_stack(name):
        yield name, (info.rows // old * (old + len(parts.experts)), *info.shape[1:])
        return
    yield name, info.shape
    (unit,) = architecture.units(name)
    if unit.expert == 0:
        head, _, tail = name.rpartition(".0.")
        for number in range(old, old + len(parts.experts)):
            yield f"{head}.{number}.{tail}", info.shape


def _grown_copies(
    parts: Parts,
    grown: Architecture,
    routers: Mapping[int, RouterInfo],
    sources: Sequence[Source],
    info: TensorInfo,
) -> Iterator[Copy]:
    """Yield the copies of one tensor: units of added experts from dense models, the rest from the
    base."""
    layer = grown.layer_of(info.name)
    if layer is None or layer not in routers or grown.role(info.name) is not Role.EXPERT:
        yield Copy(WHOLE, parts.base, info.name)
        return
    old = routers[layer].rows
    kept: set[tuple[int, int] | None] = set()
    for unit in grown.units(info.name):
        if unit.expert is None or unit.projection is None or len(unit.shape) != 2:
            raise ArchitectureError(
                f"{parts.base.label}: {info.name} is not a matrix of experts, so experts cannot be "
                "added"
            )
        if unit.expert >= old:
            source = sources[unit.expert - old]
            found = matching_unit(source, unit, unit.projection)
            yield Copy(unit.slot, source[0], found.tensor, found.slot)
        elif unit.slot.rows not in kept:
            kept.add(unit.slot.rows)
            rows = Slot(unit.slot.rows)
            yield Copy(rows, parts.base, info.name, rows)
