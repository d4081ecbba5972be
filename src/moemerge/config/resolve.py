"""The merge a config describes, in one shape whatever form it was written in.

`models` become one slice over all layers. The base model is found its place as in mergekit: for a
method that merges it like any other it is an ordinary input (added at the end, without parameters,
when `models` lacks it); for a method that takes differences to it, it stands apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moemerge.config.lookup import ParameterReader, Scopes
from moemerge.config.models import ModelRef
from moemerge.config.parameters import BasePolicy, MethodSchema, ParameterSpec, Scalar
from moemerge.config.schema import Body, ModelEntry, RunConfig, SliceEntry, SliceSource
from moemerge.config.values import ParameterValue


@dataclass(frozen=True)
class Source:
    """A model inside a slice."""

    model: ModelRef
    name: str
    layer_range: tuple[int, int] | None  # [first, end); None: all layers the model has
    parameters: Mapping[str, ParameterValue]

    def layers(self, count: int) -> range:
        """The model's own layer numbers in this slice, for a model of `count` layers."""
        return range(count) if self.layer_range is None else range(*self.layer_range)


@dataclass(frozen=True)
class MergeSlice:
    """Layers merged with each other; `base` is set where the method keeps it apart."""

    inputs: tuple[Source, ...]
    base: Source | None
    parameters: Mapping[str, ParameterValue]
    base_model: ModelRef | None = None  # apart or not

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.inputs if self.base is None else (*self.inputs, self.base)

    def seen_by(self, schema: MethodSchema) -> tuple[tuple[Source, ...], Source | None]:
        """Inputs and base as a method sees them. They differ from the slice's own only for a
        `router:` method that keeps the base apart where the main method does not."""
        if schema.base is BasePolicy.MEMBER or self.base is not None:
            return self.inputs, None if schema.base is BasePolicy.MEMBER else self.base
        base = next((s for s in self.inputs if s.model == self.base_model), None)
        return tuple(s for s in self.inputs if s is not base), base


@dataclass(frozen=True)
class NormalisedMerge:
    """What the planner works from; nothing in it depends on how the config was written."""

    schema: MethodSchema
    slices: tuple[MergeSlice, ...]
    base_model: ModelRef | None
    models: Mapping[str, ModelRef]  # every model by name, inputs first, in the config's order
    reader: ParameterReader
    router_reader: ParameterReader | None  # routers are merged by this reader's method
    router_keep: str | None  # or routers are this model's

    @property
    def router_schema(self) -> MethodSchema | None:
        """The method that merges routers, where it is another one."""
        return self.router_reader.schema if self.router_reader else None

    @property
    def whole(self) -> bool:
        """Whether every layer of the models is merged in place (no stacking of slices)."""
        return len(self.slices) == 1 and all(s.layer_range is None for s in self.slices[0].sources)

    @property
    def donor(self) -> ModelRef:
        """The model whose config and companion files the result takes."""
        return self.base_model or self.slices[0].inputs[0].model

    def name_of(self, model: ModelRef) -> str:
        return self._names[model]

    @cached_property
    def _names(self) -> dict[ModelRef, str]:
        return {model: name for name, model in self.models.items()}

    def parameters_for(
        self,
        slice_index: int,
        source: Source | None,
        spec: ParameterSpec,
        names: Sequence[str],
        role: str | None,
        t: float,
    ) -> Scalar | None:
        """One parameter of the main method for one tensor; `source` for per-model ones."""
        return self.reader.value(slice_index, source.name if source else None, spec, names, role, t)


def entries(body: Body) -> Iterator[tuple[tuple[str | int, ...], ModelEntry]]:
    """Every mention of an input model, with its place in the body."""
    for i, entry in enumerate(body.models or ()):
        yield ("models", i), entry
    for i, piece in enumerate(body.slices or ()):
        for j, source in enumerate(piece.sources):
            yield ("slices", i, "sources", j), source


def model_names(config: RunConfig) -> dict[str, ModelRef]:
    """Every model of the merge by name: the given one, else the folder's, made unique.

    Inputs come first in the order they are written, then bases that are no input.
    """
    order: dict[ModelRef, str | None] = {}
    for _, entry in entries(config.body):
        order[entry.model] = order.get(entry.model) or entry.name
    bases = [config.base_model, *(s.base_model for s in config.body.slices or ())]
    for base in bases:
        if base is not None:
            order.setdefault(base, None)
    given = {name for name in order.values() if name is not None}
    names: dict[str, ModelRef] = {}
    for model, name in order.items():
        label, number = name or model.label, 1
        while label in names or (name is None and label in given):
            number += 1
            label = f"{name or model.label}-{number}"
        names[label] = model
    return names


def normalise(config: RunConfig, schemas: Mapping[str, MethodSchema]) -> NormalisedMerge:
    """The planner's view of a config that `load_config` has checked."""
    schema = schemas[config.merge_method]
    models = model_names(config)
    names = {model: name for name, model in models.items()}
    slices = tuple(_slices(config, schema.base, names))
    module = (config.body.parameters,) if config.modules else ()
    scopes = Scopes(
        models=tuple({s.name: s.parameters for s in piece.sources} for piece in slices),
        slices=tuple(piece.parameters for piece in slices),
        outer=(*module, config.parameters),
    )
    router_reader = None
    if config.router is not None and config.router.merge_method is not None:
        router_schema = schemas[config.router.merge_method]
        router_reader = ParameterReader(router_schema, scopes, override=config.router.parameters)
    return NormalisedMerge(
        schema=schema,
        slices=slices,
        base_model=config.base_model,
        models=models,
        reader=ParameterReader(schema, scopes),
        router_reader=router_reader,
        router_keep=names[config.router.keep] if config.router and config.router.keep else None,
    )


def _slices(
    config: RunConfig, policy: BasePolicy, names: Mapping[ModelRef, str]
) -> Iterator[MergeSlice]:
    body = config.body
    if body.models is not None:
        sources = [Source(e.model, names[e.model], None, e.parameters) for e in body.models]
        base = config.base_model
        if base is not None and all(s.model != base for s in sources):
            sources.append(Source(base, names[base], None, {}))
        yield _apart(sources, base, policy, {})
    for piece in body.slices or ():
        yield _slice(piece, piece.base_model or config.base_model, policy, names)


def _slice(
    piece: SliceEntry, base: ModelRef | None, policy: BasePolicy, names: Mapping[ModelRef, str]
) -> MergeSlice:
    sources = [_source(s, names) for s in piece.sources]
    apart = base is not None and policy is not BasePolicy.MEMBER
    if apart and base is not None and all(s.model != base for s in sources):
        shared = shared_range(piece)  # checked: without one, the base must be listed
        sources.append(Source(base, names[base], shared, {}))
    return _apart(sources, base, policy, piece.parameters)


def _source(entry: SliceSource, names: Mapping[ModelRef, str]) -> Source:
    return Source(entry.model, names[entry.model], entry.layer_range, entry.parameters)


def shared_range(piece: SliceEntry) -> tuple[int, int] | None:
    """The layer range of a slice's sources, when all have the same."""
    ranges = {source.layer_range for source in piece.sources}
    return next(iter(ranges)) if len(ranges) == 1 else None


def _apart(
    sources: Sequence[Source],
    base: ModelRef | None,
    policy: BasePolicy,
    parameters: Mapping[str, ParameterValue],
) -> MergeSlice:
    if base is None or policy is BasePolicy.MEMBER:
        return MergeSlice(tuple(sources), None, parameters, base)
    inputs = tuple(s for s in sources if s.model != base)
    return MergeSlice(inputs, next(s for s in sources if s.model == base), parameters, base)
