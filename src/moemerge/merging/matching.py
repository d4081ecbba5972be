"""Pair the tensors of different models, and place each in the output.

Models of one family may store the same weights under other names and in other stacks. A unit's key
is the same in all of them, so every model's units are indexed by key. Missing tensors are found
before anything is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moemerge.checkpoint import TensorInfo
from moemerge.config.resolve import MergeSlice, NormalisedMerge, SliceModel
from moemerge.errors import ArchitectureError, CheckpointError, ConfigError
from moemerge.families.architecture import Architecture
from moemerge.families.opened import OpenModel
from moemerge.families.roles import WHOLE, Role, Unit
from moemerge.merging.plan import Account, MergeBlock
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.progress import counted, first_few


@dataclass(frozen=True)
class UnitIndex:
    """All units of one model by key, and by stored tensor."""

    model: OpenModel

    @cached_property
    def by_tensor(self) -> Mapping[str, tuple[Unit, ...]]:
        return self.model.architecture.units_by_tensor

    @cached_property
    def by_key(self) -> Mapping[str, Unit]:
        return self.model.architecture.units_by_key

    @cached_property
    def head(self) -> Unit | None:
        """Return the embedding if it serves as the head (tied weights), else None."""
        if not self.model.architecture.tied:
            return None
        units = self.by_key.values()
        if any(u.role is Role.HEAD for u in units):
            return None
        return next((u for u in units if u.role is Role.EMBEDDING and len(u.shape) == 2), None)

    def find(self, unit: Unit, key: str | None = None) -> Unit | None:
        """Return this model's counterpart of another model's `unit`; `key` if layers are moved."""
        match = self.by_key.get(unit.key if key is None else key)
        return self.head if match is None and unit.role is Role.HEAD else match

    def info(self, unit: Unit) -> TensorInfo:
        return self.model.checkpoint.tensors[unit.tensor]


def is_auxiliary(unit: Unit, architecture: Architecture) -> bool:
    """Return whether the model runs without the unit: extra prediction layers, often stripped."""
    beyond = unit.layer is not None and unit.layer >= architecture.num_layers
    return beyond or ".mtp." in f".{unit.key}"


def require_one_family(models: Sequence[OpenModel]) -> None:
    """Refuse models of different families."""
    first = models[0]
    for other in models[1:]:
        if other.architecture.model_type != first.architecture.model_type:
            raise ArchitectureError(
                f"{first.label} is {first.architecture.model_type!r}, but "
                f"{other.label} is {other.architecture.model_type!r}",
                hint="only models of one family, fine-tunes of one base, can be merged",
            )
    for model in models:
        model.require_readable("dequantise it first")


def require_layers(models: Sequence[OpenModel]) -> None:
    """Refuse whole models with different numbers of layers."""
    first = models[0]
    for other in models[1:]:
        if other.architecture.num_layers != first.architecture.num_layers:
            raise ArchitectureError(
                f"{first.label} has {first.architecture.num_layers} layers, but "
                f"{other.label} has {other.architecture.num_layers}",
                hint="choose the layers to merge with `slices:`",
            )


def require_one_tying(donor: OpenModel, last: OpenModel) -> None:
    """Refuse slices that tie the head differently in the config's model and the head's model."""
    if donor.architecture.tied == last.architecture.tied:
        return
    tied, untied = (donor, last) if donor.architecture.tied else (last, donor)
    raise ArchitectureError(
        f"{tied.label} ties its output head to the embeddings, but "
        f"{untied.label} has one of its own; the result takes its config from "
        f"{donor.label} and its head from {last.label}",
        hint="untie the one first, or let the last slice's first source be the config's model",
    )


def require_shape(unit: Unit, mine: UnitIndex, match: Unit, theirs: UnitIndex) -> None:
    if match.shape == unit.shape:
        return
    raise CheckpointError(
        f"tensor {match.tensor} of {theirs.model.label} has shape "
        f"{list(match.shape)}, but {mine.model.label} has {list(unit.shape)}"
        + ("" if match.tensor == unit.tensor else f" (in {unit.tensor})"),
        hint="only models of one size can be merged; the two are not fine-tunes of one base",
    )


def dtype_error(stored: TensorInfo, model: str, dtype: Dtype) -> CheckpointError:
    """Return the error for a tensor that holds integers in one model and not in another."""
    return CheckpointError(
        f"tensor {stored.name} is {dtype} in {model}, but "
        f"{stored.dtype} in the model it is merged with",
        hint="the models are not fine-tunes of one base",
    )


def missing_error(model: OpenModel, reference: OpenModel, names: Sequence[str]) -> CheckpointError:
    """Return the error for tensors that `reference` has and `model` does not."""
    return CheckpointError(
        f"{model.label} lacks {counted(len(names), 'tensor')} that {reference.label} has: "
        f"{first_few(names)}",
        hint="the download may be incomplete, or the models are not fine-tunes of one base",
    )


@dataclass(frozen=True)
class Destination:
    """The position of a reference model's tensor in the output."""

    slice_index: int
    t: float  # position inside the slice, for gradients
    layers: Mapping[str, int]  # model name -> its layer for this output layer; may be empty
    layer: int | None


@dataclass(frozen=True)
class Destinations:
    """Iterates over (reference model, stored tensor, destination) in output order.

    The final norm and the head belong to the last slice, all other tensors outside the layers to
    the first. Extra prediction layers, beyond the model's layer count, follow the last layer.
    """

    merge: NormalisedMerge
    index: Mapping[str, UnitIndex]

    def reference(self, merge_slice: MergeSlice) -> SliceModel:
        """Return the source whose tensors, names and layout the output has in this slice."""
        donor = self.merge.donor
        return next((m for m in merge_slice.models if m.model == donor), merge_slice.models[0])

    def origins(self) -> Iterator[tuple[str, int]]:
        """Yield, for every output layer, the reference model and its layer."""
        for merge_slice in self.merge.slices:
            reference = self.reference(merge_slice)
            yield from ((reference.name, layer) for layer in self._layers(reference))

    def _layers(self, source: SliceModel) -> range:
        count = self.index[source.name].model.architecture.num_layers
        layers = source.layers(count)
        if layers and layers[-1] >= count:
            raise ConfigError(
                f"layer_range [{layers.start}, {layers.stop}) of {source.model} goes past its last "
                f"layer: it has {count}, numbered 0 to {count - 1}",
            )
        return layers

    def __iter__(self) -> Iterator[tuple[str, str, Destination]]:
        slices = self.merge.slices
        first, last = self.reference(slices[0]), self.reference(slices[-1])
        yield from self._outside(first.name, 0, last=False)
        offset = 0
        for i, merge_slice in enumerate(slices):
            reference = self.reference(merge_slice)
            by_layer = self._by_layer[reference.name]
            ranges = {m.name: self._layers(m) for m in merge_slice.models}
            length = len(ranges[reference.name])
            for n in range(length):
                layers = {name: numbers[n] for name, numbers in ranges.items()}
                t = n / (length - 1) if length > 1 else 1.0
                destination = Destination(i, t, layers, offset + n)
                for name in by_layer[layers[reference.name]]:
                    yield reference.name, name, destination
            offset += length
        yield from self._outside(last.name, len(slices) - 1, last=True)
        yield from self._beyond(last.name, len(slices) - 1, offset)

    @cached_property
    def _by_layer(self) -> dict[str, dict[int | None, list[str]]]:
        """Return each reference model's tensors by layer; None: outside the layers."""
        models = {self.reference(merge_slice).name for merge_slice in self.merge.slices}
        by_layer = {model: defaultdict[int | None, list[str]](list) for model in models}
        for model, tensors in by_layer.items():
            layer_of = self.index[model].model.architecture.layer_of
            for name in self.index[model].by_tensor:
                tensors[layer_of(name)].append(name)
        return dict(by_layer)

    def _outside(
        self, model: str, slice_index: int, *, last: bool
    ) -> Iterator[tuple[str, str, Destination]]:
        """Yield tensors outside the layers. As in mergekit, gradients use their first value."""
        for name in self._by_layer[model][None]:
            units = self.index[model].by_tensor[name]
            if any(u.role in (Role.HEAD, Role.NORM) for u in units) == last:
                yield model, name, Destination(slice_index, 0.0, {}, None)

    def _beyond(
        self, model: str, slice_index: int, offset: int
    ) -> Iterator[tuple[str, str, Destination]]:
        """Yield the extra prediction layers, which follow the last layer."""
        count = self.index[model].model.architecture.num_layers
        tensors = self._by_layer[model]
        for layer in sorted(n for n in tensors if n is not None and n >= count):
            layers = {
                m.name: layer - count + self.index[m.name].model.architecture.num_layers
                for m in self.merge.slices[slice_index].models
            }
            for name in tensors[layer]:
                yield model, name, Destination(slice_index, 0.0, layers, offset + layer - count)


Kind = tuple[object, ...]  # everything that a plan depends on besides names


class PlannedTensor(NamedTuple):
    """An output tensor that is merged at once."""

    info: TensorInfo
    block: MergeBlock
    fates: Mapping[str, Account]  # of the tensor in each model


class PlannedKinds:
    """The first planned tensor of each kind. Others of the kind are planned like it.

    Thousands of experts differ in nothing but their names, if all models have one structure and
    keep their layers.
    """

    def __init__(self, index: Mapping[str, UnitIndex]) -> None:
        self._index = index
        self._planned: dict[Kind, PlannedTensor] = {}
        self._layer: Destination | None = None
        self._is_uniform = False  # whether all models have the layer's tensors alike

    def kind(self, reference: str, name: str, to: Destination) -> Kind | None:
        """Return the kind of a reference model's tensor; None if it must be planned alone."""
        index = self._index[reference]
        if to is not self._layer:
            self._layer = to
            self._is_uniform = to.layer is not None and all(
                self._index[model].by_tensor is index.by_tensor and layer == to.layer
                for model, layer in to.layers.items()
            )
        units, stored = index.by_tensor[name], index.model.checkpoint.tensors[name]
        if not self._is_uniform or len(units) > 1 or units[0].slot is not WHOLE:
            return None
        return to.slice_index, to.t, units[0].role, stored.shape, stored.dtype

    def add(self, kind: Kind, planned: PlannedTensor) -> None:
        """Remember the plan of a tensor that is merged at once."""
        self._planned[kind] = planned

    def like(self, kind: Kind | None, unit: Unit) -> PlannedTensor | None:
        """Return the plan of a tensor of a planned kind, else None."""
        first = None if kind is None else self._planned.get(kind)
        if first is None:
            return None
        info = TensorInfo(unit.tensor, first.info.dtype, first.info.shape, first.info.nbytes)
        block = MergeBlock(unit.tensor, None, info.shape, first.block.planned, unit=unit)
        return PlannedTensor(info, block, first.fates)
