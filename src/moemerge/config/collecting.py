"""Every setting of `moemerge stats`, with the defaults that the command line and the API use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from moemerge.config.calibration import Dtype
from moemerge.config.fields import PositiveInt, Strict, device_name


class CollectingSettings(Strict):
    """What is gathered, over how much text, and where the model runs."""

    kind: Literal["gram", "fisher"] = Field(
        "gram", description="gram: second moments of inputs (regmean); fisher: squared gradients"
    )
    max_tokens: PositiveInt | None = Field(None, description="most tokens (default: all)")
    max_length: PositiveInt = Field(2048, description="tokens at which a row is cut")
    limit: PositiveInt | None = Field(None, description="most rows (default: all)")
    seed: Annotated[int, Field(strict=True, ge=0)] = Field(
        0, description="seed of the choice of rows"
    )
    offload: Literal["auto", "device", "cpu", "disk"] = Field(
        "auto", description="where hidden states live between layers"
    )
    device: Annotated[str, PlainValidator(device_name)] = Field(
        "auto", description="auto, cpu, cuda or cuda:N"
    )
    dtype: Dtype = Field("auto", description="dtype of the model (auto: the checkpoint's)")
