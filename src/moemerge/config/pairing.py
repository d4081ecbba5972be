"""Models by the names a user gives them, and the calibration text that belongs to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moemerge.config.calibration import CalibrationBlock, CalibrationSettings
from moemerge.config.models import ModelRef
from moemerge.config.problems import Path, Problem, listed
from moemerge.config.resolve import entries, model_names
from moemerge.config.schema import RouterSettings, RunConfig, TokenizerSettings, TokenSource
from moemerge.registry import did_you_mean


@dataclass(frozen=True)
class CalibrationRun:
    """What a config's `calibration:` block asks for: sources and their text under one name."""

    settings: CalibrationSettings
    sources: Mapping[str, ModelRef]
    data: Mapping[str, tuple[str, ...]]


def find_model(models: Mapping[str, ModelRef], wanted: ModelRef) -> ModelRef | None:
    """The model of the merge that `wanted` means, by its path or by its name."""
    if wanted in models.values():
        return wanted
    return models.get(str(wanted))


def name_problems(config: RunConfig, prefix: Path) -> list[Problem]:
    """Names that two models share, or a model with two names."""
    found = []
    owner: dict[str, ModelRef] = {}
    called: dict[ModelRef, str] = {}
    for path, entry in entries(config.body):
        if entry.name is None:
            continue
        place = (*prefix, *path, "name")
        if owner.setdefault(entry.name, entry.model) != entry.model:
            text = f"{entry.name!r} is the name of {owner[entry.name]} already"
            found.append(Problem(place, text))
        elif called.setdefault(entry.model, entry.name) != entry.name:
            text = f"{entry.model} is called {called[entry.model]!r} already"
            found.append(Problem(place, text))
    return found


def reference_problems(config: RunConfig) -> list[Problem]:
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
        Problem(place, f"{str(model)!r} is no model of this merge{_close(str(model), models)}")
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


def calibration_run(config: RunConfig) -> CalibrationRun | None:
    """The calibration of a checked config; None where it has no `calibration:` block."""
    block = config.calibration
    if block is None:
        return None
    sources, optional = _sources(config, block)
    data = block.data or config.data or {}
    chosen = {n: m for n, m in {**sources, **optional}.items() if n in data}
    return CalibrationRun(block.settings, chosen, {n: data[n] for n in chosen})


def pairing_problems(config: RunConfig) -> list[Problem]:
    """Each source has text, and each text a source."""
    found: list[Problem] = []
    models = model_names(config)
    block = config.calibration
    if block is not None:
        if isinstance(block.sources, tuple):
            found += [
                Problem(("calibration", "sources", i), _no_model(name, models))
                for i, name in enumerate(block.sources)
                if name not in models
            ]
        found += _unpaired(config, block) if not found else []
    if config.data is not None and (block is None or block.data is not None):
        known = {**models, **(_sources(config, block)[0] if block else {})}
        found += [
            Problem(("data", name), _no_model(name, known))
            for name in config.data
            if name not in known
        ]
    return found


def _sources(
    config: RunConfig, block: CalibrationBlock
) -> tuple[dict[str, ModelRef], dict[str, ModelRef]]:
    """Sources that need text, and models that may have some (the base, unless it is chosen)."""
    models = model_names(config)
    if isinstance(block.sources, dict):
        return dict(block.sources), {}
    if block.sources is not None:
        return {name: models[name] for name in block.sources if name in models}, {}
    bases = {config.base_model, *(s.base_model for s in config.body.slices or ())}
    return (
        {name: model for name, model in models.items() if model not in bases},
        {name: model for name, model in models.items() if model in bases},
    )


def _unpaired(config: RunConfig, block: CalibrationBlock) -> list[Problem]:
    sources, optional = _sources(config, block)
    place: Path = ("data",) if block.data is None else ("calibration", "data")
    data = block.data or config.data
    if data is None:
        text = f"needs `data`, the text that calibrates each of: {listed(sources)}"
        return [Problem(("calibration",), text)]
    found = []
    missing = [name for name in sources if name not in data]
    for name in data:
        if name in sources or name in optional:
            continue
        found.append(Problem((*place, name), _no_model(name, sources, missing)))
        close = [m for m in missing if repr(m) in did_you_mean(name, missing)]
        missing = [m for m in missing if m not in close]
    if missing:
        text = f"no data for {listed(missing)}; every source needs text under its own name"
        found.append(Problem(place, text))
    return found


def _no_model(name: str, models: Mapping[str, ModelRef], likely: list[str] | None = None) -> str:
    close = did_you_mean(name, likely or models) or did_you_mean(name, models)
    return f"no model is called {name!r}{close or '; known: ' + listed(models)}"
