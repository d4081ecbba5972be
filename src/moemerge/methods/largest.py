"""Methods that take each element's largest change: EMR's unified model (Huang et al. 2024) and
MagMax (Marczak et al. 2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moemerge.methods.method import Lambda, Tensors, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("emr", base="required", elementwise=True)
def emr(deltas: Tensors) -> Tensor:
    """Take the sign of the task vectors' sum, and the largest size among those with this sign.

    Element by element: s = sign(Σ δ_i), minus if it is zero, and
    θ_0 + s max{|δ_i| : sign(δ_i) = s}. Intended for `tasks: {keep: emr}`, which recovers each model
    from it. By itself it merges the largest changes.
    """
    vectors = torch.stack([*deltas])
    sign = torch.where(vectors.sum(0) > 0, 1.0, -1.0)
    return sign * (vectors * sign).amax(0).clamp_min(0)


@merge_method("magmax", base="required", elementwise=True)
def magmax(deltas: Tensors, *, lambda_: Lambda = 1.0) -> Tensor:
    """Take each element's largest change, with its sign: θ_0 + λ δ_i with i = argmax |δ_i|.

    Of equally large changes, the first model's is taken.
    """
    largest = deltas[0]
    for delta in deltas[1:]:
        largest = torch.where(delta.abs() > largest.abs(), delta, largest)
    return lambda_ * largest
