"""SLTA: one coefficient for each model and unit, in closed form (Dai et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._arithmetic import average, statistics_of, weighted_sum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SltaOptions:
    ridge: float = param(
        1e-3, minimum=0, help="ridge towards equal coefficients, relative to their scale"
    )


@merge_method(
    "slta", base=BasePolicy.REQUIRED, per_model=NoParams, options=SltaOptions, statistics="gram"
)
def slta(
    inputs: Sequence[ModelTensor], base: Tensor, options: SltaOptions, unit: UnitInfo
) -> Tensor:
    """θ_0 + Σ a_i τ_i with the coefficients that answer the models' own inputs best.

    Least squares of Σ_t ‖(Σ a_i τ_i - τ_t) x‖² over the inputs x of every model t: A a = b with
    A_ij = Σ_t tr(τ_i G_t τ_jᵀ) and b_i = Σ_t tr(τ_i G_t τ_tᵀ). It has one unknown per model, so it
    also works for experts that few tokens reach. All tensors other than linear layers are averaged.
    """
    statistics = statistics_of(inputs, unit)
    if statistics is None:
        return average(inputs, [1 / len(inputs)] * len(inputs))
    vectors = [i.tensor.double() - base.double() for i in inputs]
    n = len(vectors)
    a = torch.zeros(n, n, dtype=torch.float64, device=base.device)
    b = torch.zeros(n, dtype=torch.float64, device=base.device)
    for t, known in enumerate(statistics):
        unit.check_stopped()
        gram = known.values.double() * (known.tokens / known.domain_tokens)
        answers = [vector @ gram for vector in vectors]
        inner = torch.stack([torch.stack([(y * v).sum() for v in vectors]) for y in answers])
        a += inner
        b += inner[:, t]
    coefficients = equal_share_ridge(a, b, options.ridge).tolist()
    return weighted_sum([base, *(i.tensor for i in inputs)], [1 - sum(coefficients), *coefficients])


def equal_share_ridge(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """Return the minimiser of the quadratic with a ridge towards 1/n."""
    n = len(b)
    scale = float(a.diagonal().mean())
    equal = torch.full_like(b, 1 / n)
    if scale <= 0:
        return equal
    # Always use a ridge: equal models make A singular.
    pull = max(ridge, n * torch.finfo(a.dtype).eps) * scale
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    solution: Tensor = torch.linalg.solve(a + pull * eye, b + pull * equal)
    return solution
