"""Every setting of a diagnosis. What a calibration has too is declared there, and taken from it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from moemerge.config.calibration import CalibrationSettings, Dtype
from moemerge.config.fields import PositiveInt, Strict, device_name, layer_selection
from moemerge.config.layers import LayerSelection


def _as_in_calibration(name: str) -> Any:
    """The same default and words under the same name."""
    field = CalibrationSettings.model_fields[name]
    return Field(field.default, description=field.description)


class DiagnosisSettings(Strict):
    """How a model's routing is measured."""

    layers: Annotated[LayerSelection, PlainValidator(layer_selection)] = _as_in_calibration(
        "layers"
    )
    max_tokens: PositiveInt | None = _as_in_calibration("max_tokens")
    max_length: PositiveInt = _as_in_calibration("max_length")
    limit: PositiveInt | None = _as_in_calibration("limit")
    seed: Annotated[int, Field(strict=True, ge=0)] = _as_in_calibration("seed")
    holdout: Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)] = Field(
        0.0, description="measure on those rows alone that calibrate --holdout spares (same seed)"
    )
    offload: Literal["auto", "device", "cpu", "disk"] = _as_in_calibration("offload")
    device: Annotated[str, PlainValidator(device_name)] = _as_in_calibration("device")
    dtype: Dtype = _as_in_calibration("dtype")
    swaps: Annotated[bool, Field(strict=True)] = Field(
        False,
        description="also run the model with each source's routers, and each source with the "
        "model's (twice the time)",
    )
