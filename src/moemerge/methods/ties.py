"""TIES: trim task vectors, elect a sign for each element, average those that agree (Yadav et al.
2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from moemerge.methods._sparsify import Keep, TaskVector, kept_count
from moemerge.methods._tensors import ZERO_SUM
from moemerge.methods.method import (
    Density,
    Ignored,
    Lambda,
    Param,
    Tensors,
    Weight,
    merge_method,
)
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

AgreeingSum = Annotated[bool, Param("divide by the sum of the weights that agree in sign")]
Election = Annotated[
    Literal["weighted", "unweighted"],
    Param("what votes on an element's sign: weighted or unweighted task vectors"),
]
Rescale = Annotated[bool, Param("rescale the kept elements to the original L1 norm")]


def largest(vector: TaskVector, density: float) -> Keep:
    return vector.largest(kept_count(density, vector.numel)).keep


@merge_method("ties", base="required", sparsify=largest)
def ties(
    deltas: Tensors,
    weights: Weight,
    *,
    density: Density = 1.0,
    normalize: AgreeingSum = True,
    rescale: Rescale = False,
    lambda_: Lambda = 1.0,
    int8_mask: Ignored = False,
    election: Election = "weighted",
) -> Tensor:
    """Keep each task vector's largest elements, elect a sign per element, average who agrees.

    Yadav et al. 2023. mergekit lets the weighted task vectors vote, the paper the unweighted ones
    (`election: unweighted`). The trim is per merge unit, not over the whole model.
    """
    return lambda_ * elected_sum(deltas, weights, normalize, election)


def elected_sum(
    deltas: Tensors,
    weights: Sequence[float],
    normalize: bool,
    election: str = "weighted",
    floor: float | None = None,
) -> Tensor:
    """Return, in each element, the sum of the weighted task vectors that have the elected sign.

    s = sign(Σ v_i), 0 -> +1, with v_i = w_i δ_i (`weighted`) or δ_i (`unweighted`);
    m_i = [sign(v_i) = s];  Σ w_i δ_i m_i [/ Σ w_i m_i, zero replaced by 1, at least `floor`].
    """
    weighted = election == "weighted"
    votes = [d * w for d, w in zip(deltas, weights, strict=True)] if weighted else deltas
    sign = (2 * sum(votes[1:], votes[0]).sign() + 1).sign()  # 0 elects plus
    total, divisor = torch.zeros_like(sign), torch.zeros_like(sign)
    for vote, weight in zip(votes, weights, strict=True):
        agreeing = (vote * sign).clamp_min_(0)  # magnitudes
        total.add_(agreeing, alpha=1 if weighted else weight)
        divisor.add_(agreeing.sign_(), alpha=weight)
    total *= sign
    if not normalize:
        return total
    if floor is not None:
        divisor.clamp_min_(floor)
    elif min(weights) < 0:
        divisor.masked_fill_(divisor.abs() < ZERO_SUM, 1.0)
    else:  # a nonzero sum is at least the smallest weight
        divisor.clamp_min_(min((w for w in weights if w > 0), default=1.0))
    return total / divisor
