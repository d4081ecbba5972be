"""Settings of finding coefficients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moemerge.config.fields import Fraction, Positive, PositiveInt
from moemerge.config.settings import ForwardKeywords, ForwardSettings

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


class CoefficientKeywords(ForwardKeywords, total=False):
    """The fields of `CoefficientSettings` as keywords."""

    sharpness: float
    temperature: float
    own: float
    other: float
    specific: float
    steps: int
    lr: float
    start: float
    rows: int
    anchor: float
