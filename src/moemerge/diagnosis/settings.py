"""Settings of a diagnosis."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from moemerge.config.fields import Name
from moemerge.config.settings import (
    GROUP,
    LAYERS,
    Flag,
    ForwardKeywords,
    ForwardSettings,
    LayersField,
    LayersForm,
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


class DiagnosisKeywords(ForwardKeywords, total=False):
    """The fields of `DiagnosisSettings` as keywords."""

    layers: LayersForm
    holdout: float | Literal["auto"]
    group: str | None
    swaps: bool
    base: str | Path | None
