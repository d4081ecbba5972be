"""The routers of several models: checked, paired by their place in the model, and read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from moemerge.checkpoint.reader import OverlaidCheckpoint
from moemerge.config.fields import LayerSelection
from moemerge.config.models import ModelRef
from moemerge.config.repairs import MERGED as MERGED
from moemerge.errors import ArchitectureError, NumericalError, UsageError
from moemerge.families.architecture import RouterInfo
from moemerge.families.opened import OpenModel, open_model
from moemerge.families.roles import ROUTING_ROLES
from moemerge.families.rules import Gate
from moemerge.repairs.experts import ExpertMap, ExpertMaps
from moemerge.runtime.dtypes import FLOAT_NAMES, FLOATS, dtype_name
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moemerge.forward.stops import ModuleStop
    from moemerge.forward.walk import Walk


def routing_tensors(model: OpenModel, layers: Collection[int] | None = None) -> dict[str, str]:
    """Return key -> name on disk of every tensor that decides routing.

    These are matrices, biases, scales and tables. Layers that the model never runs (multi-token
    prediction) are left out.
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
    """Return name in `model` -> name in `donor` of every routing tensor; all must match."""
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


def with_routers_of(model: OpenModel, donor: OpenModel) -> OpenModel:
    """Return `model` with the routers of `donor`; nothing is written."""
    names = pair_routing(model, donor)
    overlay = {name: partial(donor.checkpoint.read, other) for name, other in names.items()}
    checkpoint = OverlaidCheckpoint(model.checkpoint, overlay)
    checkpoint.label = f"{model.label} with the routers of {donor.label}"
    return OpenModel(model.name, checkpoint, model.architecture)


@dataclass(frozen=True)
class PairedRouter:
    """One router of the merged model, and the same router in every source."""

    info: RouterInfo
    sources: Mapping[str, RouterInfo]
    experts: Mapping[str, ExpertMap] = field(default_factory=dict)  # of sources with more experts


@dataclass(frozen=True)
class SkippedRouter:
    """A router that keeps its merged weights, and why."""

    layer: int
    router: str
    reason: str


@dataclass(frozen=True)
class ChosenRouters:
    """The routers of a job with their counterparts, and the routers that it skips."""

    layers: tuple[int, ...]
    pairs: tuple[PairedRouter, ...]
    skipped: tuple[SkippedRouter, ...]

    @classmethod
    def of(
        cls,
        merged: OpenModel,
        others: Sequence[OpenModel],
        selection: LayerSelection,
        verb: str = "calibrate",
        experts: ExpertMaps | None = None,
    ) -> ChosenRouters:
        """Return the routers in the selected layers; `verb` describes the job in errors."""
        layers = chosen_layers(merged, selection, verb)
        pairs = pair_routers(merged, others, layers, experts)
        return cls(layers, pairs, skipped_routers(merged, layers))


# Largest weight of a router: with larger ones, squared logits would overflow float32.
LARGEST_WEIGHT = 1e15


@dataclass(frozen=True)
class RouterWeights:
    """The stored tensors of one router. Only its leading `rows` are logits of experts.

    If the model has fewer experts than this source, `experts` maps them.
    """

    weight: Tensor  # (all rows, d)
    bias: Tensor | None  # (all rows,), added to the logits
    selection_bias: Tensor | None  # (model's experts,), moves the choice alone
    rows: int
    experts: ExpertMap | None = None

    @property
    def matrix(self) -> Tensor:
        """The unknowns of a solve: (rows, d), or (rows, d + 1) with the bias; float64.

        One row for each expert of the model, the mean of the source's rows behind it.
        """
        return self._stored if self.experts is None else self.experts.mean(self._stored)

    @property
    def _stored(self) -> Tensor:
        return with_bias_column(
            self.weight[: self.rows], None if self.bias is None else self.bias[: self.rows]
        )

    @property
    def is_linear(self) -> bool:
        """Return whether `matrix` times the features are the logits."""
        return self.experts is None or self.experts.is_selection

    def logits_on(self, device: torch.device, gate: Gate) -> Callable[[Tensor], Tensor]:
        """Return a function from features to logits of the model's experts."""
        from moemerge.routing.products import logits_of, working_dtype

        stored = self._stored.to(device)

        def logits(x: Tensor) -> Tensor:
            z = logits_of(x.to(working_dtype(x)), stored)
            return z if self.experts is None else self.experts.combine(gate, z)

        return logits

    def updated(
        self, model: OpenModel, router: RouterInfo, weight: Tensor, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the tensors to store; rows that are not logits of experts keep their values."""
        tensors = {router.weight: self.weight.clone()}
        tensors[router.weight][: self.rows] = weight
        if router.bias is not None and self.bias is not None and bias is not None:
            flat = self.bias.clone()
            flat[: self.rows] = bias
            tensors[router.bias] = flat.reshape(model.checkpoint.tensors[router.bias].shape)
        return tensors


def with_bias_column(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return [W b] in float64."""
    if bias is None:
        return weight.double()
    return torch.cat([weight.double(), bias.double().reshape(-1, 1)], dim=1)


# --- checks -------------------------------------------------------------------------------------


def require_calibratable(merged: OpenModel, verb: str = "calibrate") -> None:
    """Refuse a model whose routers cannot be solved for (or diagnosed), with the reason."""
    architecture = merged.architecture
    if architecture.family is None:
        what = architecture.notice or (
            f"{architecture.model_type or 'an unknown type'} has no experts, so there is no router "
            f"to {verb}"
        )
        raise ArchitectureError(
            f"{merged.label}: {what}", hint="`moemerge ls architectures` lists what can be"
        )
    if not architecture.family.served:
        raise ArchitectureError(
            f"{merged.label}: routers of {architecture.model_type} cannot be {verb}d: "
            f"{architecture.family.reason}",
            hint="`moemerge ls architectures` lists the families that can be",
        )
    merged.require_readable(f"dequantise it to bfloat16 first and {verb} that")


def require_same_family(
    merged: OpenModel,
    source: OpenModel,
    hint: str = "a source is a model that was merged: of the same family",
) -> None:
    if source.architecture.family is not merged.architecture.family:
        raise ArchitectureError(
            f"{source.what} is {source.architecture.model_type!r}, but "
            f"{merged.label} is {merged.architecture.model_type!r}",
            hint=hint,
        )


def check_sources(
    sources: Mapping[str, ModelRef], selection: LayerSelection, *, routers: bool
) -> None:
    """Check the sources and layers of a repair before its merge exists.

    Without `routers`, models may have none.
    """
    opened = [open_model(name, ref) for name, ref in sources.items()]
    for model in opened:
        require_same_family(opened[0], model)
        if routers:
            require_calibratable(model)
    selection.resolve(opened[0].architecture.num_layers)
    if routers:
        ChosenRouters.of(opened[0], opened[1:], selection)


def pair_routers(
    merged: OpenModel,
    sources: Sequence[OpenModel],
    layers: Collection[int],
    experts: ExpertMaps | None = None,
) -> tuple[PairedRouter, ...]:
    """Return every router in `layers` that can be calibrated, with its counterparts.

    `experts` maps the experts of sources that have more of them.
    """
    by_key = {
        source.name: {source.architecture.key(p.weight): p for p in source.architecture.routers()}
        for source in sources
    }
    paired = []
    for router in merged.architecture.routers():
        if not router.served or router.layer not in layers:
            continue
        key = merged.architecture.key(router.weight)
        counterparts: dict[str, RouterInfo] = {}
        maps: dict[str, ExpertMap] = {}
        for source in sources:
            other = by_key[source.name].get(key)
            if other is None:
                raise ArchitectureError(
                    f"{source.what} has no router in layer {router.layer},"
                    f" but {merged.label} has {router.weight}",
                    hint="a source has the layers of the merged model",
                )
            found = (experts or {}).get(source.name, {}).get(router.layer)
            _require_same_shape(merged, router, source, other, mapped=found is not None)
            counterparts[source.name] = other
            if found is not None:
                maps[source.name] = found
        paired.append(PairedRouter(router, counterparts, maps))
    return tuple(paired)


def _require_same_shape(
    merged: OpenModel, router: RouterInfo, source: OpenModel, other: RouterInfo, *, mapped: bool
) -> None:
    for here, there in ((router.weight, other.weight), (router.bias, other.bias)):
        if (here is None) != (there is None):
            has, lacks = (merged, source) if there is None else (source, merged)
            raise ArchitectureError(
                f"layer {router.layer}: the router of {has.label} has a bias ({here or there}), "
                f"that of {lacks.label} has none"
            )
        if here is None or there is None:
            continue
        mine, theirs = merged.checkpoint.tensors[here], source.checkpoint.tensors[there]
        same = mine.shape == theirs.shape and router.rows == other.rows
        if not same and not (mapped and mine.shape[1:] == theirs.shape[1:]):
            raise ArchitectureError(
                f"layer {router.layer}: the router of {source.what} is "
                f"{list(theirs.shape)} with {other.rows} experts, that of {merged.label} is "
                f"{list(mine.shape)} with {router.rows}",
                hint="a source has the model's width, and the model's experts or more",
            )
        for model, info in ((merged, mine), (source, theirs)):
            if info.dtype not in FLOATS:
                raise ArchitectureError(
                    f"{model.label}: {info.name} is stored as {dtype_name(info.dtype)}, expected "
                    f"one of {', '.join(FLOAT_NAMES)}",
                    hint="dequantise the model first",
                )


def gate_notices(merged: OpenModel, sources: Sequence[OpenModel], pair: PairedRouter) -> list[str]:
    """Return warnings about approximated gates, and about sources with another gate."""
    gate = pair.info.gate
    notices = []
    if gate is not None and gate.approximate:
        notices.append(f"{merged.label}: {gate.approximate}")
    for source in sources:
        theirs = pair.sources[source.name].gate
        if theirs != gate:
            notices.append(
                f"source {source.name!r} has another gate in its config ({theirs}) than the merged "
                f"model ({gate}); its routing is measured with the merged model's gate"
            )
    return notices


# --- which routers ------------------------------------------------------------------------------


def chosen_layers(
    merged: OpenModel, selection: LayerSelection, verb: str = "calibrate"
) -> tuple[int, ...]:
    """Return the selected decoder layers. `last:4` counts layers with experts.

    `verb` describes the job in errors.
    """
    routers = merged.architecture.routers()
    with_routers = sorted({router.layer for router in routers if router.served})
    if not with_routers:
        reasons = sorted({router.reason for router in routers if router.reason})
        raise ArchitectureError(
            f"{merged.label}: no router can be {verb}d"
            + (f" ({'; '.join(reasons)})" if reasons else "")
        )
    return layers_among(with_routers, merged.architecture.num_layers, selection, verb)


def layers_among(
    with_routers: Sequence[int], count: int, selection: LayerSelection, verb: str
) -> tuple[int, ...]:
    """Return the selected ones of the layers `with_routers` (of `count` decoder layers)."""
    if str(selection).startswith("last:"):
        return tuple(with_routers[at] for at in selection.resolve(len(with_routers)))
    numbers = selection.resolve(count)
    chosen = tuple(layer for layer in with_routers if layer in numbers)
    if not chosen:
        raise UsageError(
            f"`layers` is {selection}, but none of these layers has a router to {verb}",
            hint=f"layers with one: {', '.join(map(str, with_routers))}",
        )
    return chosen


def skipped_routers(merged: OpenModel, layers: Collection[int]) -> tuple[SkippedRouter, ...]:
    """Return the routers that keep their merged weights: not selected, or not solvable."""
    skipped = []
    for router in merged.architecture.routers():
        reason = router.reason if not router.served else None
        if reason is None and router.layer not in layers:
            reason = "not chosen by `layers`"
        if reason is not None:
            skipped.append(SkippedRouter(router.layer, router.weight, reason))
    return tuple(skipped)


# --- tensors ------------------------------------------------------------------------------------


def read_router(
    model: OpenModel, router: RouterInfo, experts: ExpertMap | None = None
) -> RouterWeights:
    """Read the tensors of a router; refuse values with which no routing can be computed.

    `experts` maps the router's experts to those of a model that has fewer.
    """
    tensors: dict[str, Tensor] = {}
    for name in filter(None, (router.weight, router.bias, router.selection_bias)):
        tensors[name] = model.checkpoint.read(name)
        largest = float(tensors[name].double().abs().max())
        if not largest < math.inf or (name == router.weight and largest > LARGEST_WEIGHT):
            what = "NaN or infinity" if not largest < math.inf else f"values up to {largest:.1e}"
            raise NumericalError(
                f"{model.label}: {name} (layer {router.layer}) holds {what}, with which no routing "
                "can be computed",
                hint="the checkpoint is damaged, or its training diverged",
            )
    bias = None if router.bias is None else tensors[router.bias].reshape(-1)
    selection = None
    if router.selection_bias is not None:
        selection = tensors[router.selection_bias].reshape(-1)[: router.rows]
        selection = selection if experts is None else experts.mean(selection)
    return RouterWeights(tensors[router.weight], bias, selection, router.rows, experts)


def paired_stops(
    walk: Walk, pairs: Sequence[PairedRouter]
) -> Iterator[tuple[PairedRouter, dict[str, ModuleStop]]]:
    """Run all models to each of the routers of a layer, in the order in which they run them.

    The leading model is the one that the routers are paired for.
    """
    left = {pair.info.weight: pair for pair in pairs}
    lead, label = next(iter(walk.streams)), walk.lead.checkpoint.label
    for stops in walk.routers() if pairs else ():
        name = stops[lead].weight_name
        pair = left.pop(name, None)
        if pair is None:
            raise ArchitectureError(
                f"{label}: {name} is run as a router, but the table of families knows nothing of it"
            )
        for other, info in pair.sources.items():
            if other in stops and stops[other].weight_name != info.weight:
                raise ArchitectureError(
                    f"{label} is at {name}, {other!r} at {stops[other].weight_name}",
                    hint="the models' config.json must describe the same structure",
                )
        yield pair, stops
    if left:
        raise ArchitectureError(
            f"{label}: the model never ran {', '.join(sorted(left))}",
            hint="config.json and weights may not belong together",
        )


class Router:
    """A router of the merged model before which all running models wait."""

    def __init__(
        self,
        merged: OpenModel,
        sources: Mapping[str, OpenModel],
        pair: PairedRouter,
        stop: ModuleStop,
        source_stops: Mapping[str, ModuleStop],
    ) -> None:
        self.pair = pair
        self.info = pair.info
        self.name = pair.info.weight  # on disk
        self.stop = stop
        self.source_stops = source_stops  # of the sources that run
        self.merged = read_router(merged, pair.info)
        self._model = merged
        self._sources = sources

    def source(self, name: str) -> RouterWeights:
        """Return the same router of a source."""
        return read_router(
            self._sources[name], self.pair.sources[name], self.pair.experts.get(name)
        )

    def updated(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors to store for a new router, (K, d) or (K, d + 1) with its bias."""
        weight, width = weight.cpu(), self.merged.weight.shape[1]
        bias = None if self.merged.bias is None else weight[:, width]
        return self.merged.updated(self._model, self.info, weight[:, :width], bias)
