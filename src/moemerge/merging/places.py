"""Which stored tensors make up the output, in which order, and where each one goes.

The final norm and the head belong to the last slice, all else outside the layers to the first;
layers beyond the model's own count (extra prediction layers) follow the last layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moemerge.architectures.roles import Role
from moemerge.config.resolve import MergeSlice, NormalisedMerge
from moemerge.config.resolve import Source as ConfigSource
from moemerge.errors import ConfigError
from moemerge.merging.pairing import UnitIndex


@dataclass(frozen=True)
class Place:
    """Where in the output a tensor of the reference model goes."""

    slice_index: int
    t: float  # position inside the slice, for gradients
    shift: Mapping[str, int]  # model name -> its layer for this output layer (empty: no layer)
    layer: int | None


class Places:
    """Iterate for (reference model, stored tensor, place) of every output tensor, in order."""

    def __init__(self, merge: NormalisedMerge, index: Mapping[str, UnitIndex]) -> None:
        self.merge = merge
        self.index = index

    def reference(self, piece: MergeSlice) -> ConfigSource:
        """The source whose tensors, names and layout the output takes in this slice."""
        donor = self.merge.donor
        return next((s for s in piece.sources if s.model == donor), piece.sources[0])

    def origins(self) -> Iterator[tuple[str, int]]:
        """For every output layer, the reference model and the layer that it comes from."""
        for piece in self.merge.slices:
            reference = self.reference(piece)
            yield from ((reference.name, layer) for layer in self._layers(reference))

    def _layers(self, source: ConfigSource) -> range:
        count = self.index[source.name].model.architecture.num_layers
        layers = source.layers(count)
        if layers and layers[-1] >= count:
            raise ConfigError(
                f"layer_range [{layers.start}, {layers.stop}) of {source.model} goes past its last "
                f"layer: it has {count}, numbered 0 to {count - 1}",
            )
        return layers

    def __iter__(self) -> Iterator[tuple[str, str, Place]]:
        slices = self.merge.slices
        first, last = self.reference(slices[0]), self.reference(slices[-1])
        yield from self._outside(first.name, 0, last=False)
        offset = 0
        for i, piece in enumerate(slices):
            reference = self.reference(piece)
            by_layer = self._by_layer(reference.name)
            ranges = {s.name: self._layers(s) for s in piece.sources}
            length = len(ranges[reference.name])
            for n in range(length):
                shift = {name: layers[n] for name, layers in ranges.items()}
                t = n / (length - 1) if length > 1 else 1.0
                place = Place(i, t, shift, offset + n)
                for name in by_layer.get(shift[reference.name], ()):
                    yield reference.name, name, place
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
    ) -> Iterator[tuple[str, str, Place]]:
        """Tensors outside the layers; gradients give all of them their first value, as in
        mergekit."""
        architecture = self.index[model].model.architecture
        for name, units in self.index[model].by_tensor.items():
            outside = architecture.layer_of(name) is None
            if outside and any(u.role in (Role.HEAD, Role.NORM) for u in units) == last:
                yield model, name, Place(slice_index, 0.0, {}, None)

    def _beyond(
        self, model: str, slice_index: int, offset: int
    ) -> Iterator[tuple[str, str, Place]]:
        """Layers after the model's own count (extra prediction layers) follow the last layer."""
        count = self.index[model].model.architecture.num_layers
        for layer, names in sorted(self._by_layer(model).items()):
            if layer < count:
                continue
            shift = {
                s.name: layer - count + self.index[s.name].model.architecture.num_layers
                for s in self.merge.slices[slice_index].sources
            }
            for name in names:
                yield model, name, Place(slice_index, 0.0, shift, offset + layer - count)
