"""What data-driven methods must know of each model, and where a config says it comes from.

Statistics are saved files, or are computed on the way from the model's text under `data:`; a model
that has both is taken from its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moemerge.config.collecting import CollectingSettings
from moemerge.config.parameters import MethodSchema, StatisticsKind
from moemerge.config.problems import Path, Problem, listed
from moemerge.config.resolve import NormalisedMerge
from moemerge.config.schema import RunConfig
from moemerge.registry import did_you_mean

_WORDS: Mapping[StatisticsKind, str] = {
    "gram": "the second moments of each model's inputs",
    "fisher": "each model's squared gradients",
}


@dataclass(frozen=True)
class StatisticsRun:
    """The statistics of a merge: what is needed of which model, by the models' names."""

    needs: Mapping[str, tuple[StatisticsKind, ...]]
    files: Mapping[str, tuple[str, ...]]  # saved ones
    data: Mapping[str, tuple[str, ...]]  # text of the models that have none saved
    settings: CollectingSettings  # of what is computed from it; the kind follows from the needs

    @property
    def complete(self) -> bool:
        """Whether every model has saved statistics."""
        return not self.data


def statistics_run(config: RunConfig, merge: NormalisedMerge) -> StatisticsRun | None:
    """The statistics of a checked config; None where no method needs any."""
    needs = _needs(merge)
    if not needs:
        return None
    files, data = config.statistics or {}, config.data or {}
    return StatisticsRun(
        needs=needs,
        files={name: files[name] for name in needs if name in files},
        data={name: data[name] for name in needs if name not in files},
        settings=config.collecting or CollectingSettings.model_validate({}),
    )


def statistics_problems(config: RunConfig, merge: NormalisedMerge) -> Iterator[Problem]:
    """Every model that a data-driven method merges has statistics or text."""
    needs, files, data = _needs(merge), config.statistics, config.data or {}
    if not needs:
        if files is not None:
            text = f"{merge.schema.name!r} uses no statistics: remove them"
            yield Problem(("statistics",), text, True)
        if config.collecting is not None:
            text = f"{merge.schema.name!r} uses no statistics, so none are collected: remove it"
            yield Problem(("collecting",), text, True)
        return
    if config.collecting is not None and all(name in (files or {}) for name in needs):
        text = "has no effect: every model's statistics are saved ones"
        yield Problem(("collecting",), text, True)
    missing = [name for name in needs if name not in (files or {}) and name not in data]
    for name in files or {}:
        if name in needs:
            continue
        yield Problem(("statistics", name), _unknown(name, merge, needs, missing))
        close = [m for m in missing if repr(m) in did_you_mean(name, missing)]
        missing = [m for m in missing if m not in close]
    if missing:
        yield from _lacking(config, merge, missing)


def _needs(merge: NormalisedMerge) -> dict[str, tuple[StatisticsKind, ...]]:
    found: dict[str, dict[StatisticsKind, None]] = {}
    for schema in _schemas(merge):
        for piece in merge.slices:
            for source in piece.seen_by(schema)[0]:
                assert schema.statistics is not None
                found.setdefault(source.name, {})[schema.statistics] = None
    return {name: tuple(kinds) for name, kinds in found.items()}


def _schemas(merge: NormalisedMerge) -> list[MethodSchema]:
    both = (merge.schema, merge.router_schema)
    return [schema for schema in both if schema is not None and schema.statistics is not None]


def _lacking(config: RunConfig, merge: NormalisedMerge, missing: list[str]) -> Iterator[Problem]:
    if config.statistics is not None or config.data:
        place: Path = ("statistics",) if config.statistics is not None else ("data",)
        text = f"no statistics for {listed(missing)}, and no `data` to compute them from"
        yield Problem(place, f"{text}; every merged model needs one of them under its own name")
        return
    for schema in _schemas(merge):
        assert schema.statistics is not None
        main = schema is merge.schema
        text = (
            f"{schema.name!r} needs {_WORDS[schema.statistics]}: give `statistics` (files made by "
            f"`moemerge stats`) or `data` (text) for {listed(missing)}"
        )
        if config.calibration is not None and config.calibration.data is not None:
            text += "; the data of `calibration` serves both when it stands at the top"
        yield Problem(("merge_method",) if main else ("router", "merge_method"), text)


def _unknown(
    name: str, merge: NormalisedMerge, needs: Mapping[str, object], missing: list[str]
) -> str:
    if name in merge.models:
        return f"{name!r} is not merged by {merge.schema.name!r} and needs none: remove it"
    close = did_you_mean(name, missing or needs) or did_you_mean(name, needs)
    return f"no model is called {name!r}{close or '; known: ' + listed(needs)}"
