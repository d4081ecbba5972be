"""Nearswap: move elements of the base to another model's value if they are close."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods.method import Param, Tensors, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_DISTANCE = 1e-6  # smaller distances count as this


@merge_method("nearswap", base="required", models=(1, 1), elementwise=True)
def nearswap(
    tensors: Tensors,
    base: Tensor,
    *,
    t: Annotated[float, Param("distance up to which the other model's value is used fully")],
) -> Tensor:
    """Move each element of the base towards the other model's, the more the nearer they are.

    θ_0 + c·(θ - θ_0) with c = clamp(t / |θ - θ_0|, 0, 1).
    """
    distance = (tensors[0] - base).abs().clamp_min(_LEAST_DISTANCE)
    return torch.lerp(base, tensors[0], (t / distance).clamp(0, 1))
