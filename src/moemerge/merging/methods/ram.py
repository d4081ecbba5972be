"""RAM: keep elements that one model alone changed, average the others (2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import chunks, flat
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RamOptions:
    epsilon: float = param(1e-5, minimum=0, help="a change counts beyond this size")


@dataclass(frozen=True)
class RamPlusOptions(RamOptions):
    r: float = param(0.1, minimum=0, help="gain on changes that a model alone made")
    alpha: float = param(0.2, minimum=0, help="upper limit of the ratio of shared to own changes")


@merge_method("ram", base=BasePolicy.REQUIRED, per_model=NoParams, options=RamOptions)
def ram(inputs: Sequence[ModelTensor], base: Tensor, options: RamOptions, unit: UnitInfo) -> Tensor:
    """Keep changes of one model alone, average changes that several made.

    Element by element, over the models with |δ_i| > epsilon: θ_0 + mean δ_i. Intended for models
    trained by reinforcement learning, whose changes are sparse.
    """
    return _merge(inputs, base, options.epsilon, [1.0] * len(inputs))


@merge_method("ramplus_tl", base=BasePolicy.REQUIRED, per_model=NoParams, options=RamPlusOptions)
def ramplus_tl(
    inputs: Sequence[ModelTensor], base: Tensor, options: RamPlusOptions, unit: UnitInfo
) -> Tensor:
    """As `ram`, with each model's own changes amplified, more so the more changes it shares.

    Elements that model i alone changed are multiplied by 1 + r·min(shared_i / own_i, alpha), with
    the numbers of elements of this tensor that it changed together with others, and alone.
    """
    deltas = [flat(i.tensor) - flat(base) for i in inputs]
    changed = [delta.abs() > options.epsilon for delta in deltas]
    count = torch.stack(changed).sum(0)
    factors = []
    for mask in changed:
        own = int((mask & (count == 1)).sum())
        shared = int((mask & (count > 1)).sum())
        ratio = shared / own if own else 0.0
        factors.append(1 + options.r * min(ratio, options.alpha))
    return _merge(inputs, base, options.epsilon, factors)


def _merge(
    inputs: Sequence[ModelTensor], base: Tensor, epsilon: float, factors: Sequence[float]
) -> Tensor:
    """Merge element by element; `factors` multiply changes that one model alone made."""
    origin, tensors = flat(base), [flat(i.tensor) for i in inputs]
    out = torch.empty_like(origin)
    for at in chunks(origin):
        total, own = torch.zeros_like(origin[at]), torch.zeros_like(origin[at])
        count = torch.zeros_like(origin[at])
        for tensor, factor in zip(tensors, factors, strict=True):
            delta = tensor[at] - origin[at]
            changed = delta.abs() > epsilon
            delta *= changed
            total += delta
            own.add_(delta, alpha=factor)
            count += changed
        merged = torch.where(count > 1, total / count.clamp_min(1), own)
        torch.add(origin[at], merged, out=out[at])
    return out.view(base.shape)
