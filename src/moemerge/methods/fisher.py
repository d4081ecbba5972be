"""Fisher merging: average each weight by its Fisher information (Matena and Raffel 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.methods._arithmetic import (
    ErrorWeight,
    average,
    chunks,
    flat,
    params_shares,
    scratch,
    statistics_of,
)
from moemerge.methods.method import ModelTensor, Remark, UnitInfo, merge_method, param
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FisherOptions:
    normalize: bool = param(
        True, help="information per token, so that longer sequences do not count more"
    )
    floor: float = param(
        1e-6,
        minimum=0,
        exclusive_minimum=True,
        help="smallest Fisher information of a weight, relative to its tensor's mean",
    )


@merge_method(
    "fisher",
    base=BasePolicy.DONOR,
    per_model=ErrorWeight,
    options=FisherOptions,
    statistics="fisher",
    weights=params_shares,
)
def fisher(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: FisherOptions, unit: UnitInfo
) -> Tensor:
    """Average of the models, each weight by its Fisher information: Σ w_i F_i θ_i / Σ w_i F_i.

    F_i is the diagonal of model i's empirical Fisher information on its own text. If no model's
    loss depends on a weight, the floor makes it the weighted average.
    """
    weights = params_shares([i.params for i in inputs], options, unit)
    statistics = statistics_of(inputs, unit)
    if statistics is None:
        return average(inputs, weights)
    per = [s.sequences / max(1, s.domain_tokens) if options.normalize else 1.0 for s in statistics]
    means = [float(s.values.mean(dtype=torch.float64)) for s in statistics]
    mean = sum(w * c * m for w, c, m in zip(weights, per, means, strict=True))
    if not mean >= torch.finfo(torch.float32).tiny:  # also if the tensor is empty
        if inputs[0].tensor.numel():
            unit.remark(Remark.AVERAGED, {"why": "no model's loss depends on it"})
        return average(inputs, weights)
    unvisited = {
        i.name: s.tokens
        for i, s, m in zip(inputs, statistics, means, strict=True)
        if m == 0 and i.params.weight > 0
    }
    if unvisited:
        unit.remark(Remark.UNVISITED, unvisited)
    models = [
        Weighed(flat(i.tensor), flat(s.values), c / mean, weight)
        for i, s, c, weight in zip(inputs, statistics, per, weights, strict=True)
    ]
    return fisher_average(models, options.floor).view(inputs[0].tensor.shape)


@dataclass(frozen=True)
class Weighed:
    """A model's θ and F, flat, and the factor that makes the mean of F equal to 1."""

    tensor: Tensor
    information: Tensor
    scale: float
    weight: float

    def share(self, at: slice, floor: float, out: Tensor) -> Tensor:
        """Return w max(F, floor) of a chunk."""
        out = out[: at.stop - at.start]
        torch.mul(self.information[at], self.scale, out=out)
        return out.clamp_(min=floor).mul_(self.weight)


def fisher_average(models: Sequence[Weighed], floor: float) -> Tensor:
    """Return Σ w_i f_i θ_i / Σ w_i f_i with f = max(F, floor), as θ_1 plus a correction."""
    first, *others = models
    out = torch.empty_like(first.tensor)
    total_, f_, delta_ = scratch(out, 3)
    for at in chunks(out):
        total = first.share(at, floor, total_)
        chunk = out[at].zero_()
        for other in others:
            f = other.share(at, floor, f_)
            total += f
            delta = torch.sub(other.tensor[at], first.tensor[at], out=delta_[: len(f)])
            chunk.addcmul_(f, delta)
        chunk.div_(total).add_(first.tensor[at])
    return out
