"""Settings of `moemerge extract-lora` and `moemerge convert`."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from pydantic import Field

from moemerge.config.fields import PositiveInt, Strict
from moemerge.config.settings import DEVICE, DeviceField

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


class ExtractLoraKeywords(TypedDict, total=False):
    """The fields of `ExtractLoraSettings` as keywords."""

    rank: int | None
    energy: float | None
    layout: LoraLayout
    dtype: FactorDtype
    device: str
