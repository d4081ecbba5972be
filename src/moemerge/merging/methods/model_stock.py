"""Model Stock: interpolate between the base and the average (Jang et al. 2024)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import cosine, gram, weighted_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# The ratio's divisor is zero if the task vectors cancel; their average is then the base.
_LEAST_DIVISOR = 1e-6


@dataclass(frozen=True)
class ModelStockOptions:
    filter_wise: bool = param(False, help="one ratio for each row instead of each tensor")


@merge_method("model_stock", base=BasePolicy.REQUIRED, options=ModelStockOptions, models=(2, None))
def model_stock(
    inputs: Sequence[ModelTensor], base: Tensor, options: ModelStockOptions, unit: UnitInfo
) -> Tensor:
    """Go from the base towards the models' average, the further the more their changes agree.

    The result is t·mean(θ_i) + (1 - t)·θ_0 with t = N cos / (1 + (N - 1) cos). cos is the mean over
    pairs of task vectors, 0 for a zero vector.
    """
    tensors, n = [i.tensor for i in inputs], len(inputs)
    if options.filter_wise and base.dim() > 1 and base.numel() > 0:
        return _by_row(tensors, base)
    g = gram(tensors, base)
    pairs = list(itertools.combinations(range(n), 2))
    mean = torch.tensor(sum(cosine(g, i, j) for i, j in pairs) / len(pairs), dtype=torch.float64)
    t = _ratio(mean, n).item()
    return weighted_sum([base, *tensors], [1 - t, *([t / n] * n)])


def _by_row(tensors: Sequence[Tensor], base: Tensor) -> Tensor:
    n, rows = len(tensors), base.shape[0]
    origin = base.reshape(rows, -1).double()
    total = torch.zeros_like(origin)  # Σ δ_i
    direction = torch.zeros_like(origin)  # Σ δ_i / ‖δ_i‖
    nonzero = torch.zeros(rows, 1, dtype=origin.dtype, device=origin.device)
    for tensor in tensors:
        delta = tensor.reshape(rows, -1) - origin
        norm = torch.linalg.vector_norm(delta, dim=1, keepdim=True)
        nonzero += norm > 0
        total += delta
        direction += delta / torch.where(norm > 0, norm, 1.0)
    # ‖Σ u_i‖² = Σ ‖u_i‖² + the cosines of all ordered pairs
    pairs = direction.square().sum(1, keepdim=True) - nonzero
    t = _ratio(pairs / (n * (n - 1)), n)
    return (origin + t * total / n).to(base.dtype).view(base.shape)


def _ratio(cos: Tensor, n: int) -> Tensor:
    divisor = 1 + (n - 1) * cos
    vanishes = divisor < _LEAST_DIVISOR
    return torch.where(vanishes, 0.0, n * cos / torch.where(vanishes, 1.0, divisor))
