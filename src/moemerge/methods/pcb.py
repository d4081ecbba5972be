"""Parameter competition balancing (Du et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._sparsify import kept_count, ordered_at
from moemerge.methods.method import Param, Tensors, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_DIVISOR = 1e-12


@merge_method("pcb", base="required")
def pcb(
    deltas: Tensors,
    *,
    density: Annotated[
        float,
        Param("fraction of each task vector's elements that competes", minimum=0, maximum=1),
    ] = 0.1,
    clip: Annotated[
        float,
        Param("share of the elements clipped at each end beforehand", minimum=0, maximum=0.5),
    ] = 1e-4,
    lambda_: Annotated[float, Param("factor on the merged task vector")] = 1.2,
) -> Tensor:
    """Weigh each element by its size within its model and its agreement with the others.

    With a_i the squares of |δ_i| scaled to [0, 1] and T models, an element scores
    exp(T a_i)·tanh(δ_i Σ_j δ_j). Each model's lowest scores count as the cut at `density`; scaled
    to [0, 1] the scores are weights w_i, and the result is θ_0 + λ Σ w_i δ_i / Σ w_i.
    All cuts and scales are per unit; the paper takes them over the whole model.
    """
    deltas = [_clipped(delta, clip) for delta in deltas]
    total = sum(deltas[1:], deltas[0])
    weighted, weights = torch.zeros_like(total), torch.zeros_like(total)
    for delta in deltas:
        if not bool(delta.any()):
            continue  # a model that did not change this weight
        score = (len(deltas) * _to_unit(delta.abs()) ** 2).exp() * (delta * total).tanh()
        # The cut is exactly one of the scores, so that its weight is zero and not rounding error.
        kept = max(1, kept_count(density, score.numel()))
        [cut] = ordered_at(score, [score.numel() - kept])
        weight = _to_unit(score.clamp_min(cut))
        weighted.addcmul_(weight, delta)
        weights += weight
    return lambda_ * (weighted / weights.clamp_min(_LEAST_DIVISOR))


def _clipped(values: Tensor, share: float) -> Tensor:
    """Clip a fraction of the elements at either end."""
    count = int(share * values.numel())
    if count == 0:
        return values
    low, high = ordered_at(values, [count, values.numel() - 1 - count])
    return values.clamp(low, high)


def _to_unit(values: Tensor) -> Tensor:
    """Scale to [0, 1]; set all to one if they are equal."""
    low, high = torch.aminmax(values)
    return (values - low) / (high - low) if bool(high > low) else torch.ones_like(values)
