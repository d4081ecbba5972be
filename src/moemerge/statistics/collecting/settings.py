"""Settings of collecting statistics."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from moemerge.config.faults import FaultsError
from moemerge.config.parameters import StatisticsKind
from moemerge.config.settings import ForwardKeywords, ForwardSettings


class CollectingSettings(ForwardSettings):
    """What is gathered over text, over how much of it, and where the model runs."""

    common = "kind"

    kind: StatisticsKind = Field(
        "gram",
        description="gram: second moments of inputs (regmean); fisher: squared gradients; "
        "activation: mean sizes of inputs (aim); power: mean squares of inputs (neuron); "
        "sensitivity: what the loss depends on (sens)",
    )


class CollectingKeywords(ForwardKeywords, total=False):
    """The fields of `CollectingSettings` as keywords."""

    kind: StatisticsKind


class CollectingBlock(CollectingSettings):
    """How statistics are computed that were not saved before."""

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "kind" in data:
            raise FaultsError.one("the kind follows from the merge method: remove it", "kind")
        return data
