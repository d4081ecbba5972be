"""Settings of jobs that are neither merges nor repairs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moemerge.config.faults import FaultsError
from moemerge.config.fields import (
    DtypeField,
    Files,
    Fraction,
    ModelField,
    Name,
    NotEmpty,
    Positive,
    PositiveInt,
    Strict,
)
from moemerge.config.parameters import StatisticsKind
from moemerge.config.settings import (
    AUTO_HOLDOUT_HELP,
    DEVICE,
    GROUP,
    LAYERS,
    PUSH_TO_HUB,
    DeviceField,
    Flag,
    ForwardSettings,
    LayersField,
    ModelName,
    Share,
)


class DiagnosisSettings(ForwardSettings):
    """How a model's routing is measured."""

    common = "layers swaps base"

    layers: LayersField = LAYERS
    holdout: Share = Field(
        0.0,
        description="measure on those rows alone that calibrate holds out (same seed)",
    )
    group: Name | None = GROUP
    swaps: Flag = Field(
        False,
        description="also run the model with each source's routers, and each source with the "
        "model's (twice the time)",
    )
    base: ModelName | None = Field(
        None, description="model that text without a source of its name is measured against"
    )


class CollectingSettings(ForwardSettings):
    """What is gathered over text, over how much of it, and where the model runs."""

    common = "kind"

    kind: StatisticsKind = Field(
        "gram",
        description="gram: second moments of inputs (regmean); fisher: squared gradients; "
        "activation: mean sizes of inputs (aim); power: mean squares of inputs (neuron); "
        "sensitivity: what the loss depends on (sens)",
    )


class CollectingBlock(CollectingSettings):
    """How statistics are computed that were not saved before."""

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "kind" in data:
            raise FaultsError.one("the kind follows from the merge method: remove it", "kind")
        return data


CoefficientMethod = Literal["acm", "sens", "neuron", "adamerging", "expertmerging"]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]


class CoefficientSettings(ForwardSettings):
    """How coefficients are found, over how much text, and where the models run."""

    common = "rows"

    sharpness: Positive = Field(
        1.0, description="acm: how fast a coefficient falls as a layer stays what it was"
    )
    temperature: Positive = Field(
        0.1, description="sens: of the softmax over models; the higher, the more alike"
    )
    own: FiniteNumber = Field(
        1.0, description="neuron: how much of a model its own domain's neurons take"
    )
    other: FiniteNumber = Field(0.0, description="neuron: how much they take of every other model")
    specific: Positive = Field(
        2.0,
        description="neuron: times more active in its domain than in the others a neuron must be",
    )
    steps: PositiveInt = Field(500, description="adamerging, expertmerging: steps of Adam")
    lr: Positive = Field(1e-3, description="adamerging, expertmerging: step size")
    start: Fraction = Field(
        0.3, description="adamerging, expertmerging: every coefficient at the start"
    )
    rows: PositiveInt = Field(
        16, description="adamerging, expertmerging: rows of each text in one step"
    )
    anchor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        0.1, description="expertmerging: weight of the mean distance from `start`"
    )


GateMode = Literal["hidden", "cheap_embed", "random", "fit"]
Prompts = tuple[Annotated[str, Field(strict=True)], ...]


class ExpertEntry(Strict):
    """One expert: the model whose MLPs it has, and the text that it is for."""

    source_model: ModelField
    positive_prompts: Prompts = ()
    negative_prompts: Prompts = ()
    data: Files | None = None  # text of its domain, for `gate_mode: fit`


class SharedEntry(ExpertEntry):
    """An expert that every token passes; its output is multiplied by `residual_scale`."""

    residual_scale: float = Field(1.0, gt=0, allow_inf_nan=False)


class ComposeConfig(Strict):
    """A config of `moemerge compose`; mergekit-moe's files are valid."""

    base_model: ModelField
    experts: Annotated[tuple[ExpertEntry, ...], NotEmpty]
    shared_experts: tuple[SharedEntry, ...] = ()
    gate_mode: GateMode = "hidden"
    experts_per_token: PositiveInt | None = None  # default: 2, or as many as the base has
    base_data: Files | None = None  # text of a base that has experts, for `gate_mode: fit`
    attention: dict[str, Any] | None = None  # a merge, whose result replaces the base
    architecture: Name | None = None
    dtype: DtypeField | None = None


class ComposeSettings(ForwardSettings):
    """How a model is composed, as opposed to what it consists of."""

    common = "overwrite seed push_to_hub"

    holdout: Share = Field(
        "auto", description=f"share of the rows that no router is fitted on {AUTO_HOLDOUT_HELP}"
    )
    out_shard_size: str = Field("5GB", description="largest shard, such as 5GB or 500MB")
    overwrite: Flag = Field(False, description="replace OUT if it exists")
    push_to_hub: Name | None = PUSH_TO_HUB


LoraLayout = Literal["stacked", "in-out", "per-expert"]
ExpertLayoutName = Literal["per-expert", "fused"]
FactorDtype = Literal["float32", "bfloat16", "float16"]


class ExtractLoraSettings(Strict):
    """How the difference of two models is written as an adapter."""

    common = "rank energy layout"

    rank: PositiveInt | None = Field(
        None, description="largest rank of each matrix (default: 16, or no limit with `energy`)"
    )
    energy: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="lowest rank that keeps this share of each matrix's squared change"
    )
    layout: LoraLayout = Field(
        "stacked",
        description="experts as PEFT 0.19.1 and later read them (stacked), as PEFT 0.17 to 0.19.0 "
        "do (in-out), or one module per expert, for transformers 4 (per-expert)",
    )
    dtype: FactorDtype = Field("float32", description="dtype of the adapter")
    device: DeviceField = DEVICE
