"""Settings of `moemerge rescale`."""

from __future__ import annotations

from pydantic import Field

from moemerge.config.settings import LAYERS, ForwardSettings, LayersField


class RescaleSettings(ForwardSettings):
    """Which routers to rescale, and the largest factor."""

    layers: LayersField = LAYERS
    most: float = Field(2.0, gt=0, allow_inf_nan=False, description="largest factor")
