"""Model Stock (Jang et al. 2024)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated

from moemerge.methods._tensors import average, cosine, gram
from moemerge.methods.method import Param, Tensors, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# The ratio's divisor is zero if the task vectors cancel; their average is then the base.
_LEAST_DIVISOR = 1e-6


@merge_method("model_stock", base="required", models=(2, None))
def model_stock(
    deltas: Tensors,
    *,
    filter_wise: Annotated[bool, Param("one ratio for each row instead of each tensor")] = False,
) -> Tensor:
    """Go from the base towards the models' average, the further the more their changes agree.

    The result is t·mean(θ_i) + (1 - t)·θ_0 with t = N cos / (1 + (N - 1) cos). cos is the mean over
    pairs of task vectors, 0 for a zero vector.
    """
    n, mean = len(deltas), average(deltas)
    if filter_wise and mean.dim() > 1 and mean.numel() > 0:
        cos = _cosines_by_row(deltas)
    else:
        g = gram(deltas)
        pairs = [cosine(g, i, j) for i, j in itertools.combinations(range(n), 2)]
        cos = torch.tensor(sum(pairs) / len(pairs), dtype=torch.float64)
    divisor = 1 + (n - 1) * cos
    vanishes = divisor < _LEAST_DIVISOR
    t = torch.where(vanishes, 0.0, n * cos / torch.where(vanishes, 1.0, divisor))
    return t.to(mean.device) * mean


def _cosines_by_row(deltas: Tensors) -> Tensor:
    """Return the mean cosine of all pairs in float64, by row."""
    n = len(deltas)
    vectors = torch.stack([*deltas]).flatten(2).double()  # (models, rows, columns)
    norms = vectors.norm(dim=2, keepdim=True)
    directions = vectors / torch.where(norms > 0, norms, 1.0)
    # ‖Σ u_i‖² = Σ ‖u_i‖² + the cosines of all ordered pairs
    pairs: Tensor = directions.sum(0).square().sum(1) - (norms > 0).sum((0, 2))
    return (pairs / (n * (n - 1))).view(-1, *[1] * (deltas[0].dim() - 1))
