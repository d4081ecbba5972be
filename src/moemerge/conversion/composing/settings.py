"""The config and the settings of `moemerge compose`. The config is mergekit-moe's, and more."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moemerge.config.fields import (
    DtypeField,
    Files,
    ModelField,
    Name,
    NotEmpty,
    PositiveInt,
    Strict,
)
from moemerge.config.settings import (
    AUTO_HOLDOUT_HELP,
    PUSH_TO_HUB,
    Flag,
    ForwardKeywords,
    ForwardSettings,
    Share,
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


class ComposeKeywords(ForwardKeywords, total=False):
    """The fields of `ComposeSettings` as keywords."""

    holdout: float | Literal["auto"]
    out_shard_size: str
    overwrite: bool
    push_to_hub: str | None
