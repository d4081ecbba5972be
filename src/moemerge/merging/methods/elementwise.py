"""Methods that treat each element alone: linear, passthrough, task arithmetic, nearswap, EMR,
MagMax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import (
    Weighted,
    chunks,
    flat,
    scratch,
    shares,
    weight_sum,
    weighted_sum,
)
from moemerge.merging.methods._task_vectors import SumOptions
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LinearOptions:
    normalize: bool = param(True, help="divide by the sum of the weights")


def linear_shares(
    params: Sequence[Weighted], options: LinearOptions, unit: UnitInfo
) -> Sequence[float]:
    """Return each model's weight, normalised if the options require it."""
    weights = [p.weight for p in params]
    return shares(weights, unit) if options.normalize else weights


@merge_method(
    "linear",
    base=BasePolicy.MEMBER,
    per_model=Weighted,
    options=LinearOptions,
    elementwise=True,
    weights=linear_shares,
)
def linear(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: LinearOptions, unit: UnitInfo
) -> Tensor:
    """Weighted average of the models: Σ w_i θ_i / Σ w_i."""
    weights = linear_shares([i.params for i in inputs], options, unit)
    return weighted_sum([i.tensor for i in inputs], weights)


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


@dataclass(frozen=True)
class TaskArithmeticParams(Weighted):
    density: float = param(1.0, help="accepted for mergekit's configs; has no effect here")


@dataclass(frozen=True)
class TaskArithmeticOptions(SumOptions):
    rescale: bool = param(False, help="accepted for mergekit's configs; has no effect here")


@merge_method(
    "task_arithmetic",
    base=BasePolicy.REQUIRED,
    per_model=TaskArithmeticParams,
    options=TaskArithmeticOptions,
    elementwise=True,
)
def task_arithmetic(
    inputs: Sequence[ModelTensor],
    base: Tensor,
    options: TaskArithmeticOptions,
    unit: UnitInfo,
) -> Tensor:
    """Add the weighted sum of task vectors to the base: θ_0 + λ Σ w_i (θ_i - θ_0)."""
    weights = [i.params.weight for i in inputs]
    factor = options.lambda_ / (weight_sum(weights) if options.normalize else 1.0)
    origin, tensors = flat(base), [flat(i.tensor) for i in inputs]
    out = torch.empty_like(origin)
    buffers = scratch(origin, 2)
    for at in chunks(origin):
        delta, total = (x[: at.stop - at.start] for x in buffers)
        total.zero_()
        for tensor, weight in zip(tensors, weights, strict=True):
            total.add_(torch.sub(tensor[at], origin[at], out=delta), alpha=weight)
        torch.add(origin[at], total, alpha=factor, out=out[at])
    return out.view(base.shape)


_LEAST_DISTANCE = 1e-6  # smaller distances count as this


@dataclass(frozen=True)
class NearswapOptions:
    t: float = param(help="distance up to which the other model's value is used fully")


@merge_method(
    "nearswap", base=BasePolicy.REQUIRED, options=NearswapOptions, models=(1, 1), elementwise=True
)
def nearswap(
    inputs: Sequence[ModelTensor], base: Tensor, options: NearswapOptions, unit: UnitInfo
) -> Tensor:
    """Move each element of the base towards the other model's, the more the nearer they are.

    θ_0 + c·(θ - θ_0) with c = clamp(t / |θ - θ_0|, 0, 1).
    """
    origin, other = flat(base), flat(inputs[0].tensor)
    out = torch.empty_like(origin)
    buffers = scratch(origin, 1)
    for at in chunks(origin):
        share = buffers[0][: at.stop - at.start]
        torch.sub(other[at], origin[at], out=share).abs_().clamp_min_(_LEAST_DISTANCE)
        share.reciprocal_().mul_(options.t).clamp_(0, 1)
        torch.lerp(origin[at], other[at], share, out=out[at])
    return out.view(base.shape)


@merge_method("emr", base=BasePolicy.REQUIRED, elementwise=True)
def emr(inputs: Sequence[ModelTensor], base: Tensor, options: NoParams, unit: UnitInfo) -> Tensor:
    """Take the sign of the task vectors' sum, and the largest size among those with this sign.

    Element by element: s = sign(Σ δ_i), minus if it is zero, and
    θ_0 + s max{|δ_i| : sign(δ_i) = s}. Intended for `tasks: {keep: emr}`, which recovers each model
    from it. By itself it merges the largest changes.
    """
    origin = flat(base)
    models = [flat(i.tensor) for i in inputs]
    out = torch.empty_like(origin)
    for at in chunks(origin):
        deltas = [model[at] - origin[at] for model in models]
        sign = torch.where(torch.stack(deltas).sum(0) > 0, 1.0, -1.0).to(origin.dtype)
        largest = torch.zeros_like(sign)
        for delta in deltas:
            torch.maximum(largest, delta * sign, out=largest)
        torch.addcmul(origin[at], sign, largest, out=out[at])
    return out.view(base.shape)


@dataclass(frozen=True)
class MagmaxOptions:
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")


@merge_method("magmax", base=BasePolicy.REQUIRED, options=MagmaxOptions, elementwise=True)
def magmax(
    inputs: Sequence[ModelTensor], base: Tensor, options: MagmaxOptions, unit: UnitInfo
) -> Tensor:
    """Take each element's largest change, with its sign: θ_0 + λ δ_i with i = argmax |δ_i|.

    Of equally large changes, the first model's is taken.
    """
    origin = flat(base)
    models = [flat(i.tensor) for i in inputs]
    out = torch.empty_like(origin)
    for at in chunks(origin):
        largest = models[0][at] - origin[at]
        for model in models[1:]:
            delta = model[at] - origin[at]
            largest = torch.where(delta.abs() > largest.abs(), delta, largest)
        torch.add(origin[at], largest, alpha=options.lambda_, out=out[at])
    return out.view(base.shape)
