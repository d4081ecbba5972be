"""A study file as frozen data: sources, text, merges, repairs, evaluations and tables.

Merges are kept as they were written. `plan` checks each of them like a config.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from moemerge.config.faults import Fault, FaultsError, listed, shown
from moemerge.config.fields import (
    ChatTemplateField,
    Files,
    ModelField,
    ModelForm,
    Name,
    NotEmpty,
    PositiveInt,
    Strict,
    model_ref,
    read_by,
)
from moemerge.config.job_settings import DiagnosisSettings
from moemerge.config.models import ModelRef
from moemerge.config.repairs import Repair, RepairBlock
from moemerge.config.schema import REPAIRS, with_repairs
from moemerge.config.settings import DEVICE, DeviceField, Flag, Seed
from moemerge.config.text_settings import NamedTexts, Text, Texts
from moemerge.lab.settings import PERPLEXITY, EvaluationSettings
from moemerge.lab.tuning.settings import TuningSettings

BASE = "base"  # the base's name among those of the sources
Keep = Literal["models", "results"]
FigureKind = Literal["groups", "bars", "lines", "layers", "none"]
AVERAGE = "average"  # routers: of the merged models, averaged
AS_MERGED = "as merged"  # the row of a merge that is not repaired


class TuneBlock(TuningSettings):
    """What a model is tuned with."""

    data: Text | None = Field(
        None, description="rows to learn: files, hub data sets, or how to make them"
    )


class TunedSource(Strict):
    """A source that the study tunes itself."""

    tune: TuneBlock = Field(description="settings of the tuning, and its rows")
    model: ModelField | None = Field(None, description="what is tuned (default: the base)")

    @model_validator(mode="after")
    def _has_rows(self) -> TunedSource:
        if self.tune.data is None:
            raise FaultsError.one("is missing: the rows to learn", "tune", "data")
        return self


def _source(raw: object) -> ModelRef | TunedSource:
    if isinstance(raw, TunedSource):
        return raw
    if isinstance(raw, Mapping) and "tune" in raw:
        return TunedSource.model_validate(raw)
    return model_ref(raw)


BY_VERB: Final[Mapping[str, Repair]] = {repair.verb: repair for repair in REPAIRS}


@with_repairs(BY_VERB)
class RepairEntry(Strict):
    """One of `repairs:`, applied to every merge. It has exactly one of its kinds."""

    kinds: ClassVar[tuple[str, ...]] = ("routers", *BY_VERB, "tune")
    blocks: ClassVar[tuple[str, ...]] = (*BY_VERB, "tune")

    routers: Name | None = Field(
        None, description="other routers: average (of the merged models), or a source's name"
    )
    tune: TuneBlock | None = Field(None, description="settings of a tuning after the merge")
    after: Name | None = Field(None, description="the repair that it begins from (default: none)")
    text: Name | None = Field(None, description="which of `texts` it uses (default: `data`)")
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of the rows of text that it uses (default: all)"
    )
    x: float | None = Field(None, description="its position on the axis of the figure")

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        given = [kind for kind in cls.kinds if kind in data]
        if len(given) != 1:
            raise FaultsError.one(f"give one of {listed(cls.kinds)}, not {listed(given) or 'none'}")
        if given == ["routers"] and (idle := [k for k in ("text", "share") if k in data]):
            raise FaultsError.one("swapped routers need no text: remove it", idle[0])
        if isinstance(block := data[given[0]], Mapping) and "check" in block:
            text = "a study measures its models itself: give this text to `evaluate`"
            raise FaultsError.one(text, given[0], "check")
        return data

    @property
    def kind(self) -> str:
        return next(kind for kind in self.kinds if getattr(self, kind) is not None)

    @property
    def block(self) -> RepairBlock | None:
        """The block of a repair that a merge config may have, too."""
        block: RepairBlock | None = getattr(self, self.kind) if self.kind in BY_VERB else None
        return block


class EvaluateBlock(EvaluationSettings):
    """What is asked of every model."""

    tasks: Annotated[Texts, NotEmpty] = Field(description="names of tasks, or TASK.yml files")
    data: dict[str, Files] = Field(
        {},
        description="files of problems by task, in place of those that it names; and texts of the "
        "task perplexity, under any other name",
    )

    def texts(self, tasks: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return the texts of the task perplexity, if it is requested; `tasks` are the others."""
        if PERPLEXITY not in self.tasks:
            return {}
        return {name: files for name, files in self.data.items() if name not in tasks}

    def perplexity_faults(self, tasks: Collection[str]) -> list[Fault]:
        """Return what the task perplexity lacks; `tasks` are the others."""
        if PERPLEXITY in self.tasks and not self.texts(tasks):
            return [Fault(("evaluate", "data"), "the task perplexity needs text: NAME: FILE")]
        if not tasks:
            text = "besides perplexity, a study needs a task whose problems are solved"
            return [Fault(("evaluate", "tasks"), text)]
        return []

    @property
    def settings(self) -> EvaluationSettings:
        """The settings alone."""
        return self.narrowed(EvaluationSettings)


class DiagnoseBlock(DiagnosisSettings):
    """How the routing of every model is compared with the sources'."""

    data: Annotated[dict[str, Files], NotEmpty] | None = Field(
        None, description="held-out text by source (default: the study's `data`)"
    )


class TableEntry(Strict):
    """One of `tables:`. Rows are merges times repairs, after what they are measured against."""

    title: str | None = Field(None, description="its heading (default: the table's name)")
    about: str = Field("", description="a sentence below the heading")
    merges: Texts | None = Field(None, description="which merges (default: all)")
    repairs: Texts | None = Field(None, description="which repairs, besides none (default: all)")
    reference: Texts | None = Field(
        None, description="first rows: base, sources (each on its own domain), or names of sources"
    )
    compare: tuple[tuple[str, str], ...] | None = Field(
        None, description="pairs of repairs to compare (default: the control with every other one)"
    )
    figure: FigureKind = Field(
        "groups", description="none, or a figure of the overall scores (all other values)"
    )
    axis: str = Field("", description="label of the figure's axis, if repairs have an `x`")


def _mapping(raw: object) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise FaultsError.one(f"expected a merge (merge_method: ...), not {shown(raw)}")
    return dict(raw)


MergeField = Annotated[dict[str, Any], read_by(_mapping, dict[str, Any])]
SourceField = Annotated[ModelRef | TunedSource, read_by(_source, ModelForm)]


class StudyConfig(Strict):
    """A whole study file."""

    blocks: ClassVar[tuple[str, ...]] = ("diagnose",)

    title: str = Field("Study", description="what the page is called")
    about: str = Field("", description="what is studied, in a sentence")
    base: ModelField | None = Field(None, description="the model that sources were tuned from")
    chat_template: ChatTemplateField | None = Field(
        None, description="given to the base before sources are tuned from it: a name, or Jinja"
    )
    size: str | None = Field(
        None, description="size of one model, such as 13.8GB (for readers; nothing uses it)"
    )
    sources: Annotated[dict[str, SourceField], NotEmpty] = Field(
        description="models to merge, by the names of their domains"
    )
    seeds: tuple[Seed, ...] = Field(
        (), description="repeat everything for each of these: it replaces {seed} in the file"
    )
    data: NamedTexts | None = Field(
        None, description="text of each source, by name: files, or how to make one"
    )
    texts: dict[str, NamedTexts] = Field({}, description="other kinds of text, by kind and source")
    merges: Annotated[dict[str, MergeField], NotEmpty] = Field(
        description="merges by name, each a config whose models are names of sources"
    )
    repairs: dict[str, RepairEntry] = Field({}, description="what is done to merges, by name")
    evaluate: EvaluateBlock = Field(description="what is asked of every model")
    diagnose: DiagnoseBlock | None = Field(
        None, description="compare the routing, too; left empty, with defaults"
    )
    tables: dict[str, TableEntry] = Field({}, description="tables by name (default: one of all)")
    keep: Keep = Field("results", description="what stays: results alone, or the models, too")

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        sources, seeds = data.get("sources"), data.get("seeds", ())
        if isinstance(sources, Mapping) and BASE in sources:
            raise FaultsError.one("the base has its own key: `base: MODEL` at the top", BASE)
        if isinstance(seeds, list) and len({str(seed) for seed in seeds}) < len(seeds):
            raise FaultsError.one("the same seed twice: name each once", "seeds")
        return data


class StudySettings(Strict):
    """How a study is run, as opposed to what it measures."""

    common = "device jobs keep figures"

    device: DeviceField = DEVICE
    jobs: PositiveInt | None = Field(
        None, description="commands that run at a time, sharing device and cores (default: 1)"
    )
    keep: Keep | None = Field(
        None, description="what stays: results alone, or the models, too (default: the file's)"
    )
    work: Path | None = Field(
        None, description="folder of models that are only measured (default: in OUT)"
    )
    figures: Flag = Field(True, description="draw figures, which needs matplotlib")
