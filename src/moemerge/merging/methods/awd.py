"""AWD: subtract the common part of the task vectors before adding them (Xiong et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import gram, weighted_sum
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[Any]


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
    return weighted_sum([base, *(i.tensor for i in inputs)], [1 - sum(factors), *factors])


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
