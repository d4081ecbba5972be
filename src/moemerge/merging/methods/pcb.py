"""PCB: weight each element within its model and against the others (Du et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import flat
from moemerge.merging.methods._selection import kept_count, ordered_at
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


_LEAST_DIVISOR = 1e-12


@dataclass(frozen=True)
class PcbOptions:
    density: float = param(
        0.1, minimum=0, maximum=1, help="fraction of each task vector's elements that competes"
    )
    clip: float = param(
        1e-4, minimum=0, maximum=0.5, help="share of the elements clipped at each end beforehand"
    )
    lambda_: float = param(1.2, key="lambda", help="factor on the merged task vector")


@merge_method("pcb", base=BasePolicy.REQUIRED, per_model=NoParams, options=PcbOptions)
def pcb(inputs: Sequence[ModelTensor], base: Tensor, options: PcbOptions, unit: UnitInfo) -> Tensor:
    """Weigh each element by its size within its model and its agreement with the others.

    With a_i the squares of |δ_i| scaled to [0, 1] and T models, an element scores
    exp(T a_i)·tanh(δ_i Σ_j δ_j). Each model's lowest scores count as the cut at `density`; scaled
    to [0, 1] the scores are weights w_i, and the result is θ_0 + λ Σ w_i δ_i / Σ w_i.
    All cuts and scales are per unit; the paper takes them over the whole model.
    """
    origin = flat(base)
    deltas = [_clipped(flat(i.tensor) - origin, options.clip) for i in inputs]
    total = deltas[0].clone()
    for delta in deltas[1:]:
        total += delta
    weighted, weights = torch.zeros_like(origin), torch.zeros_like(origin)
    for delta in deltas:
        if not bool(delta.any()):
            continue  # a model that did not change this weight
        # In place, to avoid temporaries as large as the unit.
        score = _to_unit_(delta.abs()).square_().mul_(len(deltas)).exp_()
        score.mul_((delta * total).tanh_())
        weight = _to_unit_(score.clamp_min_(_cut(score, options.density)))
        weighted.addcmul_(weight, delta)
        weights += weight
    merged = weighted.div_(weights.clamp_min_(_LEAST_DIVISOR))
    return (origin + merged.mul_(options.lambda_)).view(base.shape)


def _clipped(values: Tensor, share: float) -> Tensor:
    """Clip a fraction of the elements at either end."""
    count = int(share * values.numel())
    if count == 0:
        return values
    low, high = ordered_at(values, [count, values.numel() - 1 - count])
    return values.clamp_(low, high)


def _to_unit_(values: Tensor) -> Tensor:
    """Scale to [0, 1] in place; set all to one if they are equal."""
    low, high = torch.aminmax(values) if values.numel() else (values.sum(), values.sum())
    if not bool(high > low):
        return values.fill_(1.0)
    return values.sub_(low).div_(high - low)


def _cut(score: Tensor, density: float) -> float:
    """Return the smallest score among the leading `density` of the elements.

    It is exactly one of the scores, so that its weight is zero and not rounding error.
    """
    kept = max(1, kept_count(density, score.numel()))
    return ordered_at(score, [score.numel() - kept])[0]
