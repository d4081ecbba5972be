"""The Karcher mean of models on the sphere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from moemerge.methods._tensors import NO_DIRECTION, average, gram, weighted_sum
from moemerge.methods.method import Param, Tensors, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_NO_LENGTH = 1e-30  # relative to the longest; the inverse of less overflows in float32


@merge_method("karcher", base="member")
def karcher(
    tensors: Tensors,
    *,
    max_iter: Annotated[
        int, Param("maximum steps of the mean's fixed-point iteration", minimum=1)
    ] = 10,
    tol: Annotated[float, Param("stop once a step is shorter than this", minimum=0)] = 1e-5,
) -> Tensor:
    """Take the Karcher mean of the models' directions on the sphere, at their mean length.

    Tensors of zeros, or nearly so, have no direction but count towards the mean length. Directions
    that cancel have no mean: then the result is the plain average.

    Iterates m <- exp_m(mean of log_m(u_i)) with log_m(u) = θ/sin θ · (u - cos θ m), on the
    coefficients c of m = Σ c_i u_i.
    """
    g = gram(tensors)
    norms = g.diagonal().sqrt()
    valid = norms > norms.max() * _NO_LENGTH
    inverse = torch.where(valid, 1 / norms, 0.0)
    cosines, count, c = g * inverse[:, None] * inverse, valid.sum(), valid.double()
    length = (c @ cosines @ c).clamp_min(0).sqrt()
    if length <= NO_DIRECTION * count:
        return average(tensors)
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
    return weighted_sum(tensors, (c * inverse * norms.mean()).tolist())
