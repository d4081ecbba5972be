"""Adaptive weight disentanglement: subtract the common part of the task vectors (Xiong et al.
2024).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from moemerge.methods._tensors import gram, weighted_sum
from moemerge.methods.method import Lambda, Param, Tensors, Weight, merge_method
from moemerge.runtime.lazy import np, torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

# Relative to the mean norm of a task vector: shorter vectors have no direction.
_SHORT = 1e-3
# Gradients are about 1; larger ones come from a vector that is almost zero.
_STEEPEST = 10.0


@merge_method("awd", base="required")
def awd(
    deltas: Tensors,
    weights: Weight = 1.0,
    *,
    alpha: Annotated[float, Param("penalty on the size of the subtracted part", minimum=0)] = 0.1,
    lr: Annotated[float, Param("step size", above=0)] = 0.01,
    steps: Annotated[int, Param("number of steps", minimum=0)] = 300,
    lambda_: Lambda = 1.0,
) -> Tensor:
    """Subtract a common part from all task vectors so that they are as orthogonal as can be.

    δ minimises mean_{i≠j} |cos(τ_i - δ, τ_j - δ)| + α ‖δ‖ / mean ‖τ_i‖ by gradient descent from 0;
    the result is θ_0 + λ Σ w_i (τ_i - δ) over the models that changed the weight. The paper's loss
    is over the whole model and in the weights' own scale; here it is per unit, and the scale does
    not matter.
    """
    g = gram(deltas)
    changed = (g.diagonal() > 0).nonzero().flatten()
    # Every gradient is a combination of the τ_i and δ, so δ = Σ c_i τ_i has n coefficients.
    c = torch.zeros(len(deltas), dtype=torch.float64)
    c[changed] = common_part(g[changed][:, changed], alpha, lr, steps)
    shared = sum(weights[i] for i in changed)
    factors = [w - shared * c_i for w, c_i in zip(weights, c.tolist(), strict=True)]
    return lambda_ * weighted_sum(deltas, factors)


def common_part(gram: Tensor, alpha: float, lr: float, steps: int) -> Tensor:
    """Return c of δ = Σ c_i τ_i in float64, from the Gram matrix of the τ_i."""
    n = len(gram)
    if n < 2:
        return torch.zeros(n, dtype=torch.float64)
    gram = gram / gram.diagonal().clamp_min(0).sqrt().mean().square()
    # With parallel τ_i, coefficients outside the range of G have no effect and would grow without
    # bound: project onto the range.
    values, vectors = torch.linalg.eigh(gram)
    kept = vectors[:, values > values[-1] * n * torch.finfo(gram.dtype).eps * 8]
    seen, g = torch.mm(kept, kept.T).numpy(), gram.numpy()
    c: npt.NDArray[Any] = np.zeros(n)
    eye = np.eye(n)
    for _ in range(steps):  # numpy is five times as fast as torch on a few numbers
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
            step = step + alpha * c / size
        step = step @ seen
        length = math.sqrt(max(float(step @ g @ step), 0.0))
        c = c - lr * step / max(length / _STEEPEST, 1.0)
    return torch.from_numpy(c)
