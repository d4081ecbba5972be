"""Repairs: jobs that `moemerge run` can do after a merge, and pruning. Each is declared once.

`config.repair_settings` declares them. The block of a config and its checks, the flags of `run`,
the steps of a study, the part of the report and the section of the model card follow from a
declaration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field, create_model

from moemerge.config.faults import FaultsError, shown
from moemerge.config.fields import DataFiles, ModelForm, Name, Strict, model_ref, read_by
from moemerge.config.models import ModelRef
from moemerge.config.settings import (
    AUTO_HOLDOUT,
    GROUP,
    LAYERS,
    Flag,
    ForwardSettings,
    LayersField,
    Share,
)
from moemerge.config.text_settings import NamedTexts
from moemerge.errors import UsageError
from moemerge.registry import did_you_mean

M = TypeVar("M")
MERGED = "merged"  # the model to repair, among the models that run


class StepSettings(ForwardSettings):
    """Settings of every step after a merge: repairs and pruning."""

    exclusive: ClassVar[tuple[str, ...]] = ()  # fields of which one unsets the others
    common = "holdout"

    holdout: Share = Field("auto", description="share of the rows kept out of every fit")
    group: Name | None = GROUP


def always_held_out(data: dict[str, Any]) -> dict[str, Any]:
    """Resolve `auto` for a repair that needs held-out rows, however few rows there are."""
    return {**data, "holdout": AUTO_HOLDOUT} if data.get("holdout") == "auto" else data


class RepairSettings(StepSettings):
    """Settings that every repair has; a repair adds its own."""

    common = "layers holdout"

    layers: LayersField = LAYERS
    strict: Flag = Field(False, description="fail when a layer does not converge")
    measure: Flag = Field(
        True,
        description="diagnose merge and result on the held-out rows, which runs the sources; for "
        "summary and card",
    )


SourceList = tuple[str | dict[str, ModelRef], ...]
NamedSources = dict[str, ModelRef] | SourceList
SourcesForm = dict[str, ModelForm] | list[str | dict[str, ModelForm]]


def named_sources(raw: object) -> NamedSources:
    """Read sources: `name: model` adds to the merged models, and a list replaces them.

    An entry of a list is the name of a model in the config, or `name: model`.
    """
    if isinstance(raw, Mapping) and raw:
        return _named(raw)
    entries = raw if isinstance(raw, (list, tuple)) else ()
    if not entries or not all(isinstance(e, str | Mapping) and e for e in entries):
        raise FaultsError.one(f"expected name: model, or a list of model names, not {shown(raw)}")
    return tuple(
        entry if isinstance(entry, str) else _named(entry, number)
        for number, entry in enumerate(entries)
    )


def _named(raw: Mapping[object, object], *place: int) -> dict[str, ModelRef]:
    models = {}
    for name, model in raw.items():
        try:
            models[str(name)] = model_ref(model)
        except FaultsError as error:
            faults = [p.under((*place, str(name))) for p in error.faults]
            raise FaultsError(faults) from None
    return models


def selected_sources(
    entries: SourceList, models: Mapping[str, M], given: Callable[[str, ModelRef], M]
) -> dict[str, M]:
    """Return the sources of a list: those of `models`, and `given` of each `name: model`."""
    chosen: dict[str, M] = {}
    for entry in entries:
        if isinstance(entry, str):
            chosen |= {entry: models[entry]} if entry in models else {}
        else:
            chosen |= {name: given(name, ref) for name, ref in entry.items()}
    return chosen


def check_names(sources: Mapping[str, object], data: Mapping[str, object]) -> None:
    """Check that every source has text under its name, and every text a source."""
    if not sources:
        raise UsageError(
            "no source given", hint="name each model that was merged: `sources={NAME: MODEL}`"
        )
    if MERGED in sources:
        raise UsageError(
            f"a source cannot have the name {MERGED!r}, which means the model to repair",
            hint="choose another name for that source and its text",
        )
    problems = [
        f"data {name!r} has no source of that name{did_you_mean(name, sources)}"
        for name in data
        if name not in sources
    ]
    problems += [
        f"source {name!r} has no data{did_you_mean(name, [n for n in data if n not in sources])}"
        for name in sources
        if name not in data
    ]
    if problems:
        raise UsageError(
            "; ".join(problems),
            hint="every source needs its text: `sources={A: MODEL}` `data={A: FILE}`",
        )


Weight = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class RepairBlock(Strict):
    """The fields that the config block of every repair has besides its settings.

    `data` defaults to the config's own `data:`, `sources` to the merged models. The name `base`
    means the config's `base_model`.
    """

    data: NamedTexts | None = Field(
        None, description="text of each source, by name: files, or how to make one"
    )
    sources: Annotated[NamedSources, read_by(named_sources, SourcesForm)] | None = Field(
        None,
        description="name: model adds to the merged models; a list of names replaces them; "
        "default: all merged models but the base",
    )
    weights: dict[str, Weight] | None = Field(
        None, description="how much each source counts, by name (default: 1)"
    )
    check: DataFiles | None = Field(
        None,
        description="text that is only measured, by name: best of a source, and not in its "
        "training data",
    )
    experts: dict[str, str] | None = Field(
        None,
        description="JSON file with the kept experts of a source that has more than the model, by "
        "name",
    )


@dataclass(frozen=True)
class Repair:
    """The declaration of a repair."""

    key: str  # of its block in a config, and of its part of the report: "calibration"
    verb: str  # its command, Python function and step of a study: "calibrate"
    settings: type[StepSettings]
    block_help: str  # description of the block in a config
    text_use: str  # what it does with a source's text: "calibrates"
    needs_routers: bool  # whether it refuses models without routers
    card_title: str  # heading of its section in the model card
    card_done: str  # "Routers calibrated", before "with moemerge 1.0"
    card_summary: str  # of the result, after "2 models merged with `ties`"
    # The held-out rows in summary and card, with every other use of them.
    card_holdout: str = "rows held out from the fit"

    @cached_property
    def block(self) -> type[RepairBlock]:
        """Its block in a config: the settings, and the sources and text to use."""
        name = self.settings.__name__.replace("Settings", "Block")
        bases: tuple[type[Any], ...] = (self.settings, RepairBlock)
        block: type[RepairBlock] = create_model(
            name,
            __base__=bases,
            __module__=__name__,
            __doc__=f"The `{self.key}:` block of a config.",
        )
        return block

    def overridden(self, block: RepairBlock, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a block, with `values` in place of those that they override."""
        exclusive = self.settings.exclusive
        unset = exclusive if any(name in values for name in exclusive) else ()
        kept = {name: getattr(block, name) for name in self.block.model_fields if name not in unset}
        return {**{n: value for n, value in kept.items() if value is not None}, **values}
