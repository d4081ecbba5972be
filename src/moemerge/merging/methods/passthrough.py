"""Pass one model through unchanged, for stacking layers of several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PassthroughParams:
    scale: float | None = param(None, help="factor on the tensor")


@merge_method(
    "passthrough",
    base=BasePolicy.MEMBER,
    per_model=PassthroughParams,
    options=NoParams,
    models=(1, 1),
    elementwise=True,
)
def passthrough(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: NoParams, unit: UnitInfo
) -> Tensor:
    """Pass one model's tensor through, times `scale` if given."""
    scale = inputs[0].params.scale
    return inputs[0].tensor if scale is None else inputs[0].tensor * scale
