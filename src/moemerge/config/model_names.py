"""Models by the names a user gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from moemerge.config.faults import Fault, Path, listed
from moemerge.config.models import ModelRef
from moemerge.config.schema import (
    Body,
    ModelEntry,
    RouterSettings,
    RunConfig,
    TokenizerSettings,
    TokenSource,
)
from moemerge.registry import did_you_mean


def entries(body: Body) -> Iterator[tuple[tuple[str | int, ...], ModelEntry]]:
    """Every mention of an input model, with its place in the body."""
    for i, entry in enumerate(body.models or ()):
        yield ("models", i), entry
    for i, merge_slice in enumerate(body.slices or ()):
        for j, source in enumerate(merge_slice.sources):
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


def find_model(models: Mapping[str, ModelRef], wanted: ModelRef) -> ModelRef | None:
    """The model of the merge that `wanted` means, by its path or by its name."""
    if wanted in models.values():
        return wanted
    return models.get(str(wanted))


def name_faults(config: RunConfig, prefix: Path) -> list[Fault]:
    """Names that two models share, or a model with two names."""
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
    """`router.keep` and token embeddings must come from a model of the merge."""
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
    """The config with names replaced by the models they mean, and one form of tokenizer."""
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
