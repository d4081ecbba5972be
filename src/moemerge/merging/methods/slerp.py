"""Spherical interpolation between the base and one model (Shoemake 1985)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import cosine, gram, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


_PARALLEL = 0.9995  # mergekit's: closer to ±1, interpolation is linear


@dataclass(frozen=True)
class SlerpOptions:
    t: float = param(help="0 is the base, 1 the other model")


@merge_method(
    "slerp", base=BasePolicy.REQUIRED, per_model=NoParams, options=SlerpOptions, models=(1, 1)
)
def slerp(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: SlerpOptions, unit: UnitInfo
) -> Tensor:
    """Interpolate along the arc from the base to one model, each tensor taken as one vector."""
    assert base is not None
    t, other = options.t, inputs[0].tensor
    c = cosine(gram([base, other]), 0, 1)
    if abs(c) > _PARALLEL:
        return weighted_sum([base, other], [1 - t, t])
    theta = math.acos(c)
    sine = math.sin(theta)
    return weighted_sum(
        [base, other], [math.sin((1 - t) * theta) / sine, math.sin(t * theta) / sine]
    )
