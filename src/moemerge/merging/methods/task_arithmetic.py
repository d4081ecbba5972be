"""The plain sum of task vectors (Ilharco et al. 2023, "Editing models with task arithmetic")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import chunks, flat, scratch
from moemerge.merging.methods._task_vectors import SumOptions
from moemerge.merging.methods._weights import Weighted, weight_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TaskArithmeticParams(Weighted):
    density: float = param(1.0, help="accepted for mergekit's configs; has no effect here")


@dataclass(frozen=True)
class TaskArithmeticOptions(SumOptions):
    rescale: bool = param(False, help="accepted for mergekit's configs; has no effect here")


@merge_method(
    "task_arithmetic",
    base=BasePolicy.REQUIRED,
    per_model=TaskArithmeticParams,
    options=TaskArithmeticOptions,
    elementwise=True,
)
def task_arithmetic(
    inputs: Sequence[ModelTensor],
    base: Tensor | None,
    options: TaskArithmeticOptions,
    unit: UnitInfo,
) -> Tensor:
    """Add the weighted sum of task vectors to the base: θ_0 + λ Σ w_i (θ_i - θ_0)."""
    assert base is not None
    weights = [i.params.weight for i in inputs]
    factor = options.lambda_ / (weight_sum(weights) if options.normalize else 1.0)
    origin, tensors = flat(base), [flat(i.tensor) for i in inputs]
    out = torch.empty_like(origin)
    buffers = scratch(origin, 2)
    for at in chunks(origin):
        delta, total = (x[: at.stop - at.start] for x in buffers)
        total.zero_()
        for tensor, weight in zip(tensors, weights, strict=True):
            total.add_(torch.sub(tensor[at], origin[at], out=delta), alpha=weight)
        torch.add(origin[at], total, alpha=factor, out=out[at])
    return out.view(base.shape)
