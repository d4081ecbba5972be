"""Nearswap: take the other model's value if it is close."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import chunks, flat, scratch
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_LEAST_DISTANCE = 1e-6  # smaller distances count as this


@dataclass(frozen=True)
class NearswapOptions:
    t: float = param(help="distance up to which the other model's value is used fully")


@merge_method(
    "nearswap",
    base=BasePolicy.REQUIRED,
    per_model=NoParams,
    options=NearswapOptions,
    models=(1, 1),
    elementwise=True,
)
def nearswap(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: NearswapOptions, unit: UnitInfo
) -> Tensor:
    """Move each element of the base towards the other model's, the more the nearer they are.

    θ_0 + c·(θ - θ_0) with c = clamp(t / |θ - θ_0|, 0, 1).
    """
    assert base is not None
    origin, other = flat(base), flat(inputs[0].tensor)
    out = torch.empty_like(origin)
    buffers = scratch(origin, 1)
    for at in chunks(origin):
        share = buffers[0][: at.stop - at.start]
        torch.sub(other[at], origin[at], out=share).abs_().clamp_min_(_LEAST_DISTANCE)
        share.reciprocal_().mul_(options.t).clamp_(0, 1)
        torch.lerp(origin[at], other[at], share, out=out[at])
    return out.view(base.shape)
