"""Which stored tensors make up the output, in which order, and where each one goes.

The final norm and the head belong to the last slice, all else outside the layers to the first;
layers beyond the model's own count (extra prediction layers) follow the last layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moemerge.architectures.roles import Role
from moemerge.config.resolve import MergeSlice, NormalisedMerge, SliceModel
from moemerge.errors import ConfigError
from moemerge.merging.matching import UnitIndex


@dataclass(frozen=True)
class Destination:
    """Where in the output a tensor of the reference model goes."""

    slice_index: int
    t: float  # position inside the slice, for gradients
    layers: Mapping[str, int]  # model name -> its layer for this output layer (empty: no layer)
    layer: int | None


class Destinations:
    """Iterate for the reference model, the stored tensor and where it goes, in output order."""

    def __init__(self, merge: NormalisedMerge, index: Mapping[str, UnitIndex]) -> None:
        self.merge = merge
        self.index = index

    def reference(self, merge_slice: MergeSlice) -> SliceModel:
        """The source whose tensors, names and layout the output takes in this slice."""
        donor = self.merge.donor
        return next((m for m in merge_slice.models if m.model == donor), merge_slice.models[0])

    def origins(self) -> Iterator[tuple[str, int]]:
        """For every output layer, the reference model and the layer that it comes from."""
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
            by_layer = self._by_layer(reference.name)
            ranges = {m.name: self._layers(m) for m in merge_slice.models}
            length = len(ranges[reference.name])
            for n in range(length):
                layers = {name: numbers[n] for name, numbers in ranges.items()}
                t = n / (length - 1) if length > 1 else 1.0
                destination = Destination(i, t, layers, offset + n)
                for name in by_layer.get(layers[reference.name], ()):
                    yield reference.name, name, destination
            offset += length
        yield from self._outside(last.name, len(slices) - 1, last=True)
        yield from self._beyond(last.name, len(slices) - 1, offset)

    def _by_layer(self, model: str) -> dict[int, list[str]]:
        architecture = self.index[model].model.architecture
        by_layer: dict[int, list[str]] = defaultdict(list)
        for name in self.index[model].by_tensor:
            layer = architecture.layer_of(name)
            if layer is not None:
                by_layer[layer].append(name)
        return by_layer

    def _outside(
        self, model: str, slice_index: int, *, last: bool
    ) -> Iterator[tuple[str, str, Destination]]:
        """Tensors outside the layers; gradients give all of them their first value, as in
        mergekit."""
        architecture = self.index[model].model.architecture
        for name, units in self.index[model].by_tensor.items():
            outside = architecture.layer_of(name) is None
            if outside and any(u.role in (Role.HEAD, Role.NORM) for u in units) == last:
                yield model, name, Destination(slice_index, 0.0, {}, None)

    def _beyond(
        self, model: str, slice_index: int, offset: int
    ) -> Iterator[tuple[str, str, Destination]]:
        """Layers after the model's own count (extra prediction layers) follow the last layer."""
        count = self.index[model].model.architecture.num_layers
        for layer, names in sorted(self._by_layer(model).items()):
            if layer < count:
                continue
            layers = {
                m.name: layer - count + self.index[m.name].model.architecture.num_layers
                for m in self.merge.slices[slice_index].models
            }
            for name in names:
                yield model, name, Destination(slice_index, 0.0, layers, offset + layer - count)
