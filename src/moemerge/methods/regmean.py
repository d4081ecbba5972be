"""Least squares on the models' own inputs: RegMean (Jin et al. 2023) and LOT (Sun et al. 2025).

With G_i the mean x xᵀ of the inputs that model i saw, c_i the share of its tokens that reached the
layer and S_i = c_i G_i, both methods solve W = (Σ w_i W_i S_i) (Σ w_i S_i)⁻¹.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from moemerge.errors import NumericalError
from moemerge.methods._tensors import shares, weighted_sum
from moemerge.methods.method import (
    ErrorWeight,
    Lambda,
    Param,
    Remark,
    Tensors,
    UnitInfo,
    UnitStatistics,
    merge_method,
)
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Gram matrices are stored in float32. The rounding error of a wide one is about 1e-6 of its
# diagonal, so directions with hardly more than that must not be corrected. Jitter starts there and
# leaves them at the average.
LEAST_PIVOT = 1e-5
MOST_JITTER = 1e-2
# Elements of a layer that are solved for at once; limits the float64 copies of a head.
SOLVE_ELEMENTS = 2**22

PerToken = Annotated[
    bool, Param("each model's text counts the same, however long; otherwise each token")
]


def check_shares(weights: Sequence[float], **others: object) -> None:
    shares(weights)


@merge_method(
    "regmean", base="donor", base_if=("anchor", "base"), statistics="gram", check=check_shares,
    time="decompositions",
)  # fmt: skip
def regmean(
    tensors: Tensors,
    base: Tensor | None,
    statistics: Sequence[UnitStatistics],
    unit: UnitInfo,
    weights: ErrorWeight = 1.0,
    *,
    factor: Annotated[
        float, Param("factor on the Gram matrices' off-diagonals", minimum=0, maximum=1)
    ] = 0.9,
    normalize: PerToken = True,
    min_tokens: Annotated[
        int,
        Param("an expert with fewer tokens in a model is pulled towards the anchor", minimum=0),
    ] = 16,
    anchor: Annotated[
        Literal["average", "base"],
        Param("result in directions without inputs: the models' average, or the base_model"),
    ] = "average",
) -> Tensor:
    """Least squared error of each linear layer's output on the models' own inputs.

    With G_i = Σ x xᵀ over the tokens that model i sent through the layer (an expert's are those
    routed to it), divided by the number of all its tokens, off-diagonals times `factor`:
    W = (Σ w_i W_i G_i) (Σ w_i G_i)⁻¹. Directions without inputs stay at the `anchor`. All tensors
    other than linear layers are averaged.
    """
    weights = shares(weights)
    lengths = [float(known.domain_tokens) if normalize else 1.0 for known in statistics]
    counts = {name: known.tokens for name, known in zip(unit.models, statistics, strict=True)}
    fewest = min(known.tokens for known, w in zip(statistics, weights, strict=True) if w > 0)
    few = max(0, min_tokens - fewest)
    if few:
        used = {name: counts[name] for name, w in zip(counts, weights, strict=True) if w > 0}
        unit.remark(Remark.NEAR_BASE if anchor == "base" else Remark.FEW_TOKENS, used)
    grams = [known.values.double() for known in statistics]
    scales = [known.tokens / n for known, n in zip(statistics, lengths, strict=True)]
    mean = weighted_sum(grams, [w * c for w, c in zip(weights, scales, strict=True)])  # S
    total, tokens = mean.clone(), sum(known.tokens for known in statistics)
    if few and tokens:
        # The missing tokens are made up for all models by the mean x xᵀ of all. This pulls an
        # expert that a model hardly visited towards the anchor, in the metric of its inputs in the
        # other models. The error on the tokens seen is never larger than that of averaging.
        made_up = few * len(lengths) / sum(lengths)
        total += weighted_sum(grams, [made_up * known.tokens / tokens for known in statistics])
    solver = Solver(_damped(total, factor), unit)
    if anchor == "base":
        assert base is not None
        moments = [c * w * g for c, w, g in zip(scales, weights, grams, strict=True)]
        terms = [(x, _damped(m, factor)) for x, m in zip(tensors, moments, strict=True)]
        return base + solver.correction(base, terms)
    # As a correction to the average W̄, (Σ w_i (W_i - W_1) (S_i - S)) S⁻¹ needs one product less
    # than the usual form and is exact if the models agree.
    excesses = [w * (c * g - mean) for c, w, g in zip(scales, weights, grams, strict=True)]
    terms = [(x, _damped(m, factor)) for x, m in zip(tensors[1:], excesses[1:], strict=True)]
    return weighted_sum(tensors, weights) + solver.correction(tensors[0], terms)


@merge_method("lot", base="required", statistics="gram", check=check_shares, time="decompositions")
def lot(
    tensors: Tensors,
    base: Tensor,
    statistics: Sequence[UnitStatistics],
    unit: UnitInfo,
    weights: ErrorWeight = 1.0,
    *,
    lambda_: Lambda = 1.0,
    normalize: PerToken = True,
) -> Tensor:
    """Least squared error of each linear layer's change on the models' own inputs.

    With G_i as in `regmean`: θ_0 + λ (Σ w_i τ_i G_i) (Σ w_i G_i)⁻¹. In directions without inputs
    the result is the base; RegMean's is the average. With λ = 1 it equals `regmean` with
    `anchor: base`, `factor: 1` and `min_tokens: 0`. All tensors other than linear layers are
    averaged.
    """
    moments = [
        weight * known.tokens / (known.domain_tokens if normalize else 1) * known.values.double()
        for weight, known in zip(shares(weights), statistics, strict=True)
    ]
    if not any(known.tokens for known in statistics):
        return base
    solver = Solver(torch.stack(moments).sum(0), unit)
    return base + lambda_ * solver.correction(base, list(zip(tensors, moments, strict=True)))


def _damped(matrix: Tensor, factor: float) -> Tensor:
    """Return the matrix with its off-diagonals times `factor`."""
    return matrix * factor + torch.diag(matrix.diagonal() * (1 - factor))


class Solver:
    """Solves X A = B for a positive definite A, by Cholesky of A scaled to unit diagonal."""

    def __init__(self, matrix: Tensor, unit: UnitInfo) -> None:
        """Factor A plus the smallest jitter·diag A that makes it definite; remark on the jitter."""
        self.unit = unit
        diagonal = matrix.diagonal()
        # A feature that never occurs has 1.
        self.scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
        scaled = matrix * self.scale * self.scale[:, None]
        jitter = 0.0
        while jitter <= MOST_JITTER:
            scaled.diagonal().fill_(1.0 + jitter)
            self.lower, failed = torch.linalg.cholesky_ex(scaled)
            if not bool(failed) and float(self.lower.diagonal().min()) ** 2 >= LEAST_PIVOT:
                if jitter:
                    unit.remark(Remark.JITTER, {"jitter": jitter})
                return
            jitter = 10 * jitter or LEAST_PIVOT
        raise NumericalError(
            f"{unit.key}: the statistics hold no positive semidefinite matrix",
            hint="the file is damaged: make it again with `moemerge stats`",
        )

    def correction(self, origin: Tensor, terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return (Σ (W_i - origin) M_i) A⁻¹ for pairs of W_i (out, in) and M_i (in, in)."""
        blocks = []
        for start in range(0, len(origin), step := max(1, SOLVE_ELEMENTS // origin.shape[1])):
            self.unit.check_stopped()
            rows = slice(start, start + step)
            right = torch.zeros_like(origin[rows], dtype=torch.float64)
            for tensor, matrix in terms:
                right.addmm_(tensor[rows].double() - origin[rows].double(), matrix)
            solved = torch.cholesky_solve((right * self.scale).T, self.lower).T * self.scale
            blocks.append(solved.to(origin.dtype))
        return torch.cat(blocks)
