"""The Riemannian (Karcher) mean on the sphere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import NO_DIRECTION, gram, weighted_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KarcherOptions:
    max_iter: int = param(10, minimum=1, help="maximum steps of the mean's fixed-point iteration")
    tol: float = param(1e-5, minimum=0, help="stop once a step is shorter than this")


@merge_method("karcher", base=BasePolicy.MEMBER, per_model=NoParams, options=KarcherOptions)
def karcher(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: KarcherOptions, unit: UnitInfo
) -> Tensor:
    """Take the Karcher mean of the models' directions on the sphere, at their mean length.

    Zero tensors have no direction but count towards the mean length. Directions that cancel have
    no mean: then the result is the plain average.
    """
    tensors = [i.tensor for i in inputs]
    g = gram(tensors)
    norms = g.diagonal().sqrt()
    inverse = torch.where(norms > 0, 1 / norms, 0.0)
    mean = _mean_direction(g * inverse[:, None] * inverse, norms > 0, options.max_iter, options.tol)
    if mean is None:
        return weighted_sum(tensors, [1 / len(tensors)] * len(tensors))
    return weighted_sum(tensors, (mean * inverse * norms.mean()).tolist())


def _mean_direction(cosines: Tensor, valid: Tensor, max_iter: int, tol: float) -> Tensor | None:
    """Return coefficients c of the mean m = Σ c_i u_i of unit vectors; None if they cancel.

    Iterates m <- exp_m(mean of log_m(u_i)) with log_m(u) = θ/sin θ · (u - cos θ m).
    """
    count = valid.sum()
    c = valid.double()
    length = (c @ cosines @ c).clamp_min(0).sqrt()
    if length <= NO_DIRECTION * count:
        return None
    c = c / length
    for _ in range(max_iter):
        cos = (cosines @ c).clamp(-1, 1)
        theta = torch.arccos(cos)
        sine = torch.sin(theta)
        # θ/sin θ is 1 at θ = 0. At θ = π no direction is preferred, so the term is zero.
        ratio = torch.where(sine > NO_DIRECTION, theta / sine, (cos > 0).double()) * valid
        step = (ratio - (ratio * cos).sum() * c) / count
        size = (step @ cosines @ step).clamp_min(0).sqrt()
        if size < tol:
            break
        c = torch.cos(size) * c + torch.sin(size) * step / size
        c = c / (c @ cosines @ c).sqrt()
    return c
