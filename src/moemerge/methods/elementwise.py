"""Methods that treat each element alone: linear, passthrough, task arithmetic, nearswap, EMR,
MagMax; and AWD, a sum of task vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.config.parameters import BasePolicy
from moemerge.methods._arithmetic import (
    Weighted,
    average,
    by_chunks,
    from_base,
    gram,
    optional_shares,
    weight_sum,
)
from moemerge.methods._task_vectors import SumOptions
from moemerge.methods.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class LinearOptions:
    normalize: bool = param(True, help="divide by the sum of the weights")


@merge_method(
    "linear",
    base=BasePolicy.MEMBER,
    per_model=Weighted,
    options=LinearOptions,
    elementwise=True,
    weights=optional_shares,
)
def linear(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: LinearOptions, unit: UnitInfo
) -> Tensor:
    """Weighted average of the models: Σ w_i θ_i / Σ w_i."""
    return average(inputs, optional_shares([i.params for i in inputs], options, unit))


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

    def add(origin: Tensor, tensors: list[Tensor]) -> Tensor:
        total = torch.zeros_like(origin)
        for tensor, weight in zip(tensors, weights, strict=True):
            total.add_(tensor - origin, alpha=weight)
        return torch.add(origin, total, alpha=factor)

    return by_chunks(base, [i.tensor for i in inputs], add)


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

    def move(origin: Tensor, tensors: list[Tensor]) -> Tensor:
        share = (tensors[0] - origin).abs_().clamp_min_(_LEAST_DISTANCE)
        return torch.lerp(origin, tensors[0], share.reciprocal_().mul_(options.t).clamp_(0, 1))

    return by_chunks(base, [inputs[0].tensor], move)


@merge_method("emr", base=BasePolicy.REQUIRED, elementwise=True)
def emr(inputs: Sequence[ModelTensor], base: Tensor, options: NoParams, unit: UnitInfo) -> Tensor:
    """Take the sign of the task vectors' sum, and the largest size among those with this sign.

    Element by element: s = sign(Σ δ_i), minus if it is zero, and
    θ_0 + s max{|δ_i| : sign(δ_i) = s}. Intended for `tasks: {keep: emr}`, which recovers each model
    from it. By itself it merges the largest changes.
    """

    def elect(origin: Tensor, tensors: list[Tensor]) -> Tensor:
        deltas = torch.stack([tensor - origin for tensor in tensors])
        sign = torch.where(deltas.sum(0) > 0, 1.0, -1.0).to(origin.dtype)
        return torch.addcmul(origin, sign, (deltas * sign).amax(0).clamp_min_(0))

    return by_chunks(base, [i.tensor for i in inputs], elect)


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

    def take(origin: Tensor, tensors: list[Tensor]) -> Tensor:
        largest = tensors[0] - origin
        for tensor in tensors[1:]:
            delta = tensor - origin
            largest = torch.where(delta.abs() > largest.abs(), delta, largest)
        return torch.add(origin, largest, alpha=options.lambda_)

    return by_chunks(base, [i.tensor for i in inputs], take)


# --- AWD: subtract the common part of the task vectors (Xiong et al. 2024) ------------------------

# Relative to the mean norm of a task vector: shorter vectors have no direction.
_SHORT = 1e-3
# Gradients are about 1; larger ones come from a vector that is almost zero.
_STEEPEST = 10.0


@dataclass(frozen=True)
class AwdParams:
    weight: float = param(1.0, help="this model's share of the sum")


@dataclass(frozen=True)
class AwdOptions:
    alpha: float = param(0.1, minimum=0, help="penalty on the size of the subtracted part")
    lr: float = param(0.01, minimum=0, exclusive_minimum=True, help="step size")
    steps: int = param(300, minimum=0, help="number of steps")
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")


@merge_method("awd", base=BasePolicy.REQUIRED, per_model=AwdParams, options=AwdOptions)
def awd(inputs: Sequence[ModelTensor], base: Tensor, options: AwdOptions, unit: UnitInfo) -> Tensor:
    """Subtract a common part from all task vectors so that they are as orthogonal as can be.

    δ minimises mean_{i≠j} |cos(τ_i - δ, τ_j - δ)| + α ‖δ‖ / mean ‖τ_i‖ by gradient descent from 0;
    the result is θ_0 + λ Σ w_i (τ_i - δ) over the models that changed the weight. The paper's loss
    is over the whole model and in the weights' own scale; here it is per unit, and the scale does
    not matter.
    """
    g = gram([i.tensor for i in inputs], base)
    changed = (g.diagonal() > 0).nonzero().flatten()
    weights = [i.params.weight for i in inputs]
    shared = sum(weights[i] for i in changed)
    # Every gradient is a combination of the τ_i and δ, so δ = Σ c_i τ_i has n coefficients.
    c = torch.zeros(len(inputs), dtype=torch.float64)
    c[changed] = common_part(g[changed][:, changed], options)
    factors = [
        options.lambda_ * (w - shared * c_i) for w, c_i in zip(weights, c.tolist(), strict=True)
    ]
    return from_base(base, inputs, factors)


def common_part(g: Tensor, options: AwdOptions) -> Tensor:
    """Return c of δ = Σ c_i τ_i in float64, from the Gram matrix of the τ_i."""
    n = len(g)
    scale = g.diagonal().clamp_min(0).sqrt().mean()
    if n < 2:
        return torch.zeros(n, dtype=torch.float64)
    g = g / scale.square()
    seen = _range_of(g).numpy()
    return torch.from_numpy(_descend(g.numpy(), seen, options))


def _descend(g: Floats, seen: Floats, options: AwdOptions) -> Floats:
    """Run gradient descent in numpy, five times as fast as torch on a few numbers."""
    n = len(g)
    c, eye = np.zeros(n), np.eye(n)
    for _ in range(options.steps):
        rest = eye - c  # row i: the coefficients of r_i = τ_i - δ
        inner = rest @ g @ rest.T
        norms = np.sqrt(np.maximum(inner.diagonal(), _SHORT**2))
        cosines = inner / norms / norms[:, None]
        sign = np.sign(cosines) / (n * (n - 1))
        np.fill_diagonal(sign, 0.0)
        # d cos_ij / dδ = -(r_i + r_j) / (‖r_i‖‖r_j‖) + cos_ij (r_i / ‖r_i‖² + r_j / ‖r_j‖²)
        pair = sign / norms / norms[:, None]
        own = (sign * cosines).sum(1) / norms**2
        step = 2 * (own - pair.sum(1)) @ rest
        size = math.sqrt(max(float(c @ g @ c), 0.0))
        if size > 0:
            step = step + options.alpha * c / size
        step = step @ seen
        length = math.sqrt(max(float(step @ g @ step), 0.0))
        c = c - options.lr * step / max(length / _STEEPEST, 1.0)
    return c


def _range_of(g: Tensor) -> Tensor:
    """Return the projector onto the range of `g`.

    With parallel τ_i, coefficients outside it have no effect and would grow without bound.
    """
    values, vectors = torch.linalg.eigh(g)
    kept = vectors[:, values > values[-1] * len(g) * torch.finfo(g.dtype).eps * 8]
    return torch.mm(kept, kept.T)
