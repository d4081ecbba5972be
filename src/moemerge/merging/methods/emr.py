"""EMR: a unified task vector; masks and scales recover each model's (Huang et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method
from moemerge.merging.methods._arithmetic import chunks, flat
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("emr", base=BasePolicy.REQUIRED, elementwise=True)
def emr(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: NoParams, unit: UnitInfo
) -> Tensor:
    """Take the sign of the task vectors' sum, and the largest size among those with this sign.

    Element by element: s = sign(Σ δ_i), minus if it is zero, and
    θ_0 + s max{|δ_i| : sign(δ_i) = s}. Intended for `tasks: {keep: emr}`, which recovers each model
    from it. By itself it merges the largest changes.
    """
    assert base is not None
    origin = flat(base)
    models = [flat(i.tensor) for i in inputs]
    out = torch.empty_like(origin)
    for at in chunks(origin):
        deltas = [model[at] - origin[at] for model in models]
        sign = torch.where(torch.stack(deltas).sum(0) > 0, 1.0, -1.0).to(origin.dtype)
        largest = torch.zeros_like(sign)
        for delta in deltas:
            torch.maximum(largest, delta * sign, out=largest)
        torch.addcmul(origin[at], sign, largest, out=out[at])
    return out.view(base.shape)
