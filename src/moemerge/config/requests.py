"""What a config requests besides the merge: a repair, text to generate, and statistics.

Statistics of a model are read from its files, or computed during the merge from its text under
`data:`. If a model has both, its files are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moemerge.config.faults import Fault, Path, listed, suggested
from moemerge.config.job_settings import CollectingSettings
from moemerge.config.models import ModelRef
from moemerge.config.parameters import MethodSchema, StatisticsKind
from moemerge.config.repairs import Repair, RepairBlock, StepSettings, selected_sources
from moemerge.config.resolve import NormalisedMerge, model_names
from moemerge.config.schema import RunConfig
from moemerge.config.text_settings import DataRecipe, files_of
from moemerge.registry import did_you_mean

BASE = "base"  # means `base_model` wherever text is given by name


def named_models(config: RunConfig) -> dict[str, ModelRef]:
    """Return the models of a config by name, and its base model as `base` too."""
    models = model_names(config)
    if config.base_model is not None:
        models.setdefault(BASE, config.base_model)
    return models


# --- repairs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestedRepair:
    """A repair that a config requests, with its sources and the text of each, by name."""

    repair: Repair
    block: RepairBlock
    sources: Mapping[str, ModelRef]
    data: Mapping[str, tuple[str, ...]]

    @property
    def check(self) -> Mapping[str, tuple[str, ...]]:
        """The text that is only measured."""
        return self.block.check or {}

    @property
    def settings(self) -> StepSettings:
        """The settings of the block."""
        return self.block.narrowed(self.repair.settings)


def requested_repairs(config: RunConfig) -> tuple[RequestedRepair, ...]:
    """Return the repairs of a checked config in the order in which they run."""
    requested = []
    for repair, block in config.repairs.items():
        sources, optional = _sources(config, block)
        data = block.data or config.data or {}
        chosen = {n: m for n, m in {**sources, **optional}.items() if n in data}
        files = {name: files_of(data[name]) for name in chosen}
        requested.append(RequestedRepair(repair, block, chosen, files))
    return tuple(requested)


def repair_faults(config: RunConfig) -> list[Fault]:
    """Check that each source has text, and each text a source."""
    faults: list[Fault] = []
    blocks = config.repairs
    for repair, block in blocks.items():
        faults += _block_faults(config, repair, block)
    if config.data is not None and all(block.data is not None for block in blocks.values()):
        known = named_models(config)
        for block in blocks.values():
            known |= _sources(config, block)[0]
        faults += [
            Fault(("data", name), _no_model(name, known))
            for name in config.data
            if name not in known
        ]
    return faults


def _block_faults(config: RunConfig, repair: Repair, block: RepairBlock) -> list[Fault]:
    faults: list[Fault] = []
    models = named_models(config)
    if isinstance(block.sources, tuple):
        faults += [
            Fault((repair.key, "sources", i), _no_model(name, models))
            for i, name in enumerate(block.sources)
            if isinstance(name, str) and name not in models
        ]
    faults += _unpaired(config, repair, block) if not faults else []
    sources, optional = _sources(config, block)
    known = {**sources, **optional}
    faults += [
        Fault((repair.key, key, name), _no_model(name, known))
        for key in ("weights", "experts")
        for name in getattr(block, key) or ()
        if name not in known
    ]
    return faults


def _sources(
    config: RunConfig, block: RepairBlock
) -> tuple[dict[str, ModelRef], dict[str, ModelRef]]:
    """Return sources that need text, and models that may have some (the base, unless chosen)."""
    models = named_models(config)
    if isinstance(block.sources, tuple):
        return selected_sources(block.sources, models, lambda _name, ref: ref), {}
    added = block.sources or {}
    bases = {config.base_model, *(s.base_model for s in config.body.slices or ())}
    merged = {name: model for name, model in models.items() if model not in bases}
    optional = {name: model for name, model in models.items() if model in bases}
    return {**merged, **added}, {n: model for n, model in optional.items() if n not in added}


def _unpaired(config: RunConfig, repair: Repair, block: RepairBlock) -> list[Fault]:
    sources, optional = _sources(config, block)
    place: Path = ("data",) if block.data is None else (repair.key, "data")
    data = block.data or config.data
    if data is None:
        text = f"needs `data`, the text that {repair.text_use} each of: {listed(sources)}"
        return [Fault((repair.key,), text)]
    missing = [name for name in sources if name not in data]
    strays = _strays(data, {**sources, **optional}, missing)
    faults = [Fault((*place, name), text) for name, text in strays]
    if missing:
        text = f"no data for {listed(missing)}; every source needs text under its own name"
        faults.append(Fault(place, text))
    return faults


def _no_model(name: str, models: Collection[str], likely: Sequence[str] = ()) -> str:
    return f"no model is called {name!r}{did_you_mean(name, likely) or suggested(name, models)}"


def _strays(
    given: Iterable[str], known: Collection[str], missing: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield each unknown name with a message.

    `missing` are the known names that were not given. Names that a misspelt one probably means are
    removed from it.
    """
    for name in given:
        if name not in known:
            yield name, _no_model(name, known, missing)
            close = did_you_mean(name, missing)
            missing[:] = [m for m in missing if repr(m) not in close]


@dataclass(frozen=True)
class TextRequest:
    """Text that is generated if its file does not exist: by this model, with this recipe."""

    model: ModelRef
    recipe: DataRecipe


def text_requests(config: RunConfig) -> dict[str, TextRequest]:
    """Return the recipes of a checked config, by the files that they generate."""
    models, requests = named_models(config), {}
    blocks = list(config.repairs.values())
    for block in blocks:
        models |= _sources(config, block)[0]
    for data in (config.data, *(block.data for block in blocks)):
        for name, text in (data or {}).items():
            if isinstance(text, DataRecipe):
                requests[text.file] = TextRequest(models[name], text)
    return requests


# --- statistics -----------------------------------------------------------------------------------

_WORDS: Mapping[StatisticsKind, str] = {
    "gram": "the second moments of each model's inputs",
    "fisher": "each model's squared gradients",
    "activation": "mean activations of the base",
    "power": "mean squares of the base's activations",
    "sensitivity": "what each model's loss depends on",
}


@dataclass(frozen=True)
class StatisticsRequest:
    """The statistics that a merge needs, by the models' names."""

    needs: Mapping[str, tuple[StatisticsKind, ...]]
    files: Mapping[str, tuple[str, ...]]  # saved ones
    data: Mapping[str, tuple[str, ...]]  # text of the models that have none saved
    settings: CollectingSettings  # of what is computed from it; the kind follows from the needs

    @property
    def complete(self) -> bool:
        """Whether every model has saved statistics."""
        return not self.data


def statistics_request(config: RunConfig, merge: NormalisedMerge) -> StatisticsRequest | None:
    """Return the statistics of a checked config, or None if no method needs any."""
    needs = _needs(merge)
    if not needs:
        return None
    files, data = config.statistics or {}, _own_data(config)
    return StatisticsRequest(
        needs=needs,
        files={name: files[name] for name in needs if name in files},
        data={name: files_of(data[name]) for name in needs if name not in files},
        settings=config.collecting or CollectingSettings.model_validate({}),
    )


def statistics_faults(config: RunConfig, merge: NormalisedMerge) -> Iterator[Fault]:
    """Check that every model of a data-driven method has statistics or text."""
    needs, files, data = _needs(merge), config.statistics, _own_data(config)
    if not needs:
        if files is not None:
            text = f"{merge.schema.name!r} uses no statistics: remove them"
            yield Fault(("statistics",), text, True)
        if config.collecting is not None:
            text = f"{merge.schema.name!r} uses no statistics, so none are collected: remove it"
            yield Fault(("collecting",), text, True)
        return
    if config.collecting is not None and all(name in (files or {}) for name in needs):
        text = "has no effect: every model's statistics are saved ones"
        yield Fault(("collecting",), text, True)
    missing = [name for name in needs if name not in (files or {}) and name not in data]
    for name, text in _strays(files or {}, needs, missing):
        if name in merge.models:
            text = f"{name!r} is not merged by {merge.schema.name!r} and needs none: remove it"
        yield Fault(("statistics", name), text)
    if missing:
        yield from _lacking(config, merge, missing)


def _own_data(config: RunConfig) -> dict[str, tuple[str, ...] | DataRecipe]:
    """Return the config's text by the models' own names: that of `base` is the base model's."""
    data, models = dict(config.data or {}), model_names(config)
    if BASE in data and BASE not in models and config.base_model is not None:
        (own,) = (name for name, model in models.items() if model == config.base_model)
        data.setdefault(own, data.pop(BASE))
    return data


@dataclass(frozen=True)
class _Need:
    """The statistics that one method or wrapper needs, and of which models."""

    schema: MethodSchema
    kind: StatisticsKind
    place: Path
    models: tuple[str, ...]


def _needs(merge: NormalisedMerge) -> dict[str, tuple[StatisticsKind, ...]]:
    needs: dict[str, dict[StatisticsKind, None]] = {}
    for need in _all_needs(merge):
        for name in need.models:
            needs.setdefault(name, {})[need.kind] = None
    return {name: tuple(kinds) for name, kinds in needs.items()}


def _all_needs(merge: NormalisedMerge) -> Iterator[_Need]:
    places: list[tuple[MethodSchema | None, Path]] = [
        (merge.schema, ("merge_method",)),
        (merge.router_schema, ("router", "merge_method")),
    ]
    for schema, place in places:
        if schema is not None and schema.statistics is not None:
            names = (m.name for s in merge.slices for m in s.seen_by(schema)[0])
            yield _Need(schema, schema.statistics, place, tuple(dict.fromkeys(names)))
    for i, reader in enumerate(merge.wraps):
        if reader.schema.statistics is not None:
            names = (s.base.name for s in merge.slices if s.base is not None)
            models = tuple(dict.fromkeys(names))
            yield _Need(reader.schema, reader.schema.statistics, ("wrap", i), models)


def _lacking(config: RunConfig, merge: NormalisedMerge, missing: list[str]) -> Iterator[Fault]:
    if config.statistics is not None or config.data:
        place: Path = ("statistics",) if config.statistics is not None else ("data",)
        text = f"no statistics for {listed(missing)}, and no `data` to compute them from"
        yield Fault(place, f"{text}; every merged model needs one of them under its own name")
        return
    for need in _all_needs(merge):
        text = (
            f"{need.schema.name!r} needs {_WORDS[need.kind]}: give `statistics` (files made by "
            f"`moemerge stats`) or `data` (text) for {listed(need.models)}"
        )
        for repair, block in config.repairs.items():
            if block.data is not None:
                text += f"; the data of `{repair.key}` serves both when it is moved to the top"
        yield Fault(need.place, text)
