"""Resolve a config's models by name, and bring every form of config into one: slices.

`models` become one slice over all layers. The base model is treated as in mergekit. For a method
that merges it like the other models, it is an ordinary input (appended, without parameters, if
`models` does not list it). For a method of task vectors, it is not among the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moemerge.config.faults import Fault, Path, listed
from moemerge.config.models import ModelRef
from moemerge.config.parameter_values import ParameterReader, Scopes, Values
from moemerge.config.parameters import BasePolicy, MethodSchema, WrapperSchema
from moemerge.config.schema import (
    Body,
    ModelEntry,
    RouterSettings,
    RunConfig,
    SliceSource,
    TokenizerSettings,
    TokenSource,
)
from moemerge.registry import did_you_mean

# --- names ----------------------------------------------------------------------------------------


def entries(body: Body) -> Iterator[tuple[tuple[str | int, ...], ModelEntry]]:
    """Return every mention of an input model, with its path in the body."""
    for i, entry in enumerate(body.models or ()):
        yield ("models", i), entry
    for i, merge_slice in enumerate(body.slices or ()):
        for j, source in enumerate(merge_slice.sources):
            yield ("slices", i, "sources", j), source


def model_names(config: RunConfig) -> dict[str, ModelRef]:
    """Return every model of the merge by name: its `name`, or the folder's, made unique.

    Inputs come first in the order they are written, then bases that are not inputs.
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


def find_model(models: Mapping[str, ModelRef], wanted: ModelRef) -> ModelRef | None:
    """Look up one of the merge's models by path or by name; None if it has no such model."""
    if wanted in models.values():
        return wanted
    return models.get(str(wanted))


def name_faults(config: RunConfig, prefix: Path) -> list[Fault]:
    """Report names that two models share, and models with two names."""
    faults = []
    owner: dict[str, ModelRef] = {}
    called: dict[ModelRef, str] = {}
    for path, entry in entries(config.body):
        if entry.name is None:
            continue
        place = (*prefix, *path, "name")
        if owner.setdefault(entry.name, entry.model) != entry.model:
            text = f"{entry.name!r} is the name of {owner[entry.name]} already"
            faults.append(Fault(place, text))
        elif called.setdefault(entry.model, entry.name) != entry.name:
            text = f"{entry.model} is called {called[entry.model]!r} already"
            faults.append(Fault(place, text))
    return faults


def reference_faults(config: RunConfig) -> list[Fault]:
    """Check that `router.keep` and token embeddings come from a model of the merge."""
    models = model_names(config)
    wanted: list[tuple[Path, ModelRef]] = []
    if config.router is not None and config.router.keep is not None:
        wanted.append((("router", "keep"), config.router.keep))
    for token, entry in (config.tokenizer.tokens if config.tokenizer else {}).items():
        place: Path = ("tokenizer", "tokens", token, "source")
        if isinstance(entry.source, ModelRef):
            wanted.append((place, entry.source))
        elif isinstance(entry.source, TokenSource) and entry.source.model is not None:
            wanted.append(((*place, "model"), entry.source.model))
    return [
        Fault(place, f"{str(model)!r} is no model of this merge{_close(str(model), models)}")
        for place, model in wanted
        if find_model(models, model) is None
    ]


def _close(name: str, models: Mapping[str, ModelRef]) -> str:
    known = [*models, *map(str, models.values())]
    return did_you_mean(name, known) or f"; its models: {listed(models)}"


def with_models(config: RunConfig) -> RunConfig:
    """Return the config with names replaced by models, and one form of tokenizer."""
    models = model_names(config)

    def meant(ref: ModelRef) -> ModelRef:
        return find_model(models, ref) or ref

    update: dict[str, object] = {}
    router, tokenizer = config.router, config.tokenizer
    if router is not None and router.keep is not None:
        update["router"] = RouterSettings(keep=meant(router.keep))
    if config.tokenizer_source is not None:
        tokenizer = TokenizerSettings(source=config.tokenizer_source)
        update["tokenizer_source"] = None
    if tokenizer is not None:
        update["tokenizer"] = _tokenizer(tokenizer, meant)
    return config.model_copy(update=update) if update else config


def _tokenizer(
    settings: TokenizerSettings, meant: Callable[[ModelRef], ModelRef]
) -> TokenizerSettings:
    source, tokens = settings.source, {}
    for token, entry in settings.tokens.items():
        origin = entry.source
        if isinstance(origin, ModelRef):
            origin = meant(origin)
        elif isinstance(origin, TokenSource) and origin.model is not None:
            origin = origin.model_copy(update={"model": meant(origin.model)})
        tokens[token] = entry.model_copy(update={"source": origin})
    if isinstance(source, ModelRef):
        source = meant(source)
    return settings.model_copy(update={"source": source, "tokens": tokens})


# --- the merge ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SliceModel:
    """A model of a slice, with its layers and parameters there."""

    model: ModelRef
    name: str
    layer_range: tuple[int, int] | None  # [first, end); None: all layers the model has
    parameters: Values

    def layers(self, count: int) -> range:
        """Return the model's layer numbers in this slice, for a model of `count` layers."""
        return range(count) if self.layer_range is None else range(*self.layer_range)


@dataclass(frozen=True)
class MergeSlice:
    """Layers that are merged; `base` is set if the method keeps it separate."""

    inputs: tuple[SliceModel, ...]
    base: SliceModel | None
    parameters: Values
    base_model: ModelRef | None = None  # apart or not

    @property
    def models(self) -> tuple[SliceModel, ...]:
        return self.inputs if self.base is None else (*self.inputs, self.base)

    def seen_by(self, schema: MethodSchema) -> tuple[tuple[SliceModel, ...], SliceModel | None]:
        """Return inputs and base for a method.

        They differ from the slice's only for a `router:` method that keeps the base separate while
        the main method does not.
        """
        if schema.base is BasePolicy.MEMBER or self.base is not None:
            return self.inputs, None if schema.base is BasePolicy.MEMBER else self.base
        base = next((s for s in self.inputs if s.model == self.base_model), None)
        return tuple(s for s in self.inputs if s is not base), base


@dataclass(frozen=True)
class NormalisedMerge:
    """The planner's input, which does not depend on how the config was written."""

    schema: MethodSchema
    slices: tuple[MergeSlice, ...]
    base_model: ModelRef | None
    models: Mapping[str, ModelRef]  # every model by name, inputs first, in the config's order
    reader: ParameterReader
    router_reader: ParameterReader | None  # routers are merged by this reader's method
    router_keep: str | None  # or routers are this model's
    wraps: tuple[ParameterReader, ...] = ()  # around the method, the first nearest to it

    @property
    def router_schema(self) -> MethodSchema | None:
        """The method that merges routers, if it is another one."""
        return self.router_reader.schema if self.router_reader else None

    @property
    def bases(self) -> set[str]:
        """The names of models that are only the base of others: merged in no slice."""
        return set(self.models) - {model.name for one in self.slices for model in one.inputs}

    @property
    def references(self) -> set[str]:
        """The names of models that are in no slice: a base that only lends config and tokenizer."""
        return set(self.models) - {model.name for one in self.slices for model in one.models}

    @property
    def whole(self) -> bool:
        """Whether every layer of the models is merged in place (no stacking of slices)."""
        return len(self.slices) == 1 and all(s.layer_range is None for s in self.slices[0].models)

    @property
    def donor(self) -> ModelRef:
        """The model whose config and companion files the result gets."""
        return self.base_model or self.slices[0].inputs[0].model

    def name_of(self, model: ModelRef) -> str:
        return self._names[model]

    @cached_property
    def _names(self) -> dict[ModelRef, str]:
        return {model: name for name, model in self.models.items()}


def normalise(
    config: RunConfig,
    schemas: Mapping[str, MethodSchema],
    wrappers: Mapping[str, WrapperSchema] | None = None,
) -> NormalisedMerge:
    """Return the planner's view of a config that `load_config` has checked."""
    schema = schemas[config.merge_method]
    models = model_names(config)
    names = {model: name for name, model in models.items()}
    slices = tuple(_slices(config, schema.base, names))
    module = (config.body.parameters,) if config.modules else ()
    scopes = Scopes(
        models=tuple({m.name: m.parameters for m in s.models} for s in slices),
        slices=tuple(s.parameters for s in slices),
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
        wraps=tuple(
            ParameterReader((wrappers or {})[entry.wrapper], scopes, override=entry.parameters)
            for entry in config.wrap or ()
        ),
    )


def _slices(
    config: RunConfig, policy: BasePolicy, names: Mapping[ModelRef, str]
) -> Iterator[MergeSlice]:
    body, apart = config.body, policy is not BasePolicy.MEMBER
    groups: list[tuple[Sequence[ModelEntry], ModelRef | None, Values]] = [
        (entry.sources, entry.base_model or config.base_model, entry.parameters)
        for entry in body.slices or ()
    ]
    if body.models is not None:
        groups.append((body.models, config.base_model, {}))
    for sources, base, parameters in groups:
        models = [SliceModel(s.model, names[s.model], _range(s), s.parameters) for s in sources]
        added = base is not None and (apart or body.models is not None)
        if base is not None and added and all(m.model != base for m in models):
            # Without a shared range, the base must be listed; this was checked.
            models.append(SliceModel(base, names[base], shared_range(sources), {}))
        own = next((m for m in models if m.model == base), None) if apart else None
        inputs = tuple(m for m in models if own is None or m.model != base)
        yield MergeSlice(inputs, own, parameters, base)


def _range(source: ModelEntry) -> tuple[int, int] | None:
    return source.layer_range if isinstance(source, SliceSource) else None


def shared_range(sources: Iterable[ModelEntry]) -> tuple[int, int] | None:
    """Return the layer range of a slice's sources if all have the same."""
    ranges = {_range(source) for source in sources}
    return ranges.pop() if len(ranges) == 1 else None
