"""What the methods that know their models' inputs share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moemerge.merging.method import ModelTensor, UnitInfo, UnitStatistics, param
from moemerge.merging.methods._blocks import weighted_sum
from moemerge.merging.remarks import AVERAGED


@dataclass(frozen=True)
class Share:
    """How much a model counts."""

    weight: float = param(1.0, minimum=0, help="how much this model's errors count")


def average(inputs: Sequence[ModelTensor], weights: Sequence[float]) -> Tensor:
    """Σ w_i θ_i."""
    return weighted_sum([i.tensor for i in inputs], weights)


def statistics_of(inputs: Sequence[ModelTensor], unit: UnitInfo) -> list[UnitStatistics] | None:
    """Every model's statistics of a unit, or None where it must be averaged.

    Units that no model has statistics of (norms, embeddings) are averaged without a word.
    """
    found = [i.statistics for i in inputs if i.statistics is not None]
    if len(found) == len(inputs):
        return found
    if found:
        lacking = ", ".join(i.name for i in inputs if i.statistics is None)
        unit.remark(AVERAGED, {"why": f"no statistics of {lacking}"})
    return None
