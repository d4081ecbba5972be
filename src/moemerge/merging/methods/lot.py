"""LOT: RegMean's least squares, for task vectors (Sun et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param, takes
from moemerge.merging.methods._weights import ErrorWeight, average, params_shares, statistics_of
from moemerge.merging.methods.regmean import Solver, corrected
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LotOptions:
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")
    normalize: bool = param(
        True, help="each model's text counts the same, however long; otherwise each token"
    )


@merge_method(
    "lot",
    base=BasePolicy.REQUIRED,
    per_model=ErrorWeight,
    options=LotOptions,
    statistics="gram",
    weights=params_shares,
)
@takes("decompositions")
def lot(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: LotOptions, unit: UnitInfo
) -> Tensor:
    """Least squared error of each linear layer's change on the models' own inputs.

    With G_i as in `regmean`: θ_0 + λ (Σ w_i τ_i G_i) (Σ w_i G_i)⁻¹. In directions without inputs
    the result is the base; RegMean's is the average. With λ = 1 it equals `regmean` with
    `anchor: base`, `factor: 1` and `min_tokens: 0`. All tensors other than linear layers are
    averaged.
    """
    assert base is not None
    weights = params_shares([i.params for i in inputs], options, unit)
    statistics = statistics_of(inputs, unit)
    if statistics is None:
        return average(inputs, weights)
    lengths = [float(s.domain_tokens) if options.normalize else 1.0 for s in statistics]
    shares = [w * s.tokens / n for w, s, n in zip(weights, statistics, lengths, strict=True)]
    out = base.clone(memory_format=torch.contiguous_format)
    if not any(shares):  # no token of any model reached the layer
        return out
    grams = [s.values.double().mul_(c) for s, c in zip(statistics, shares, strict=True)]
    solver = Solver.of(torch.stack(grams).sum(0), unit)
    terms = [(i.tensor, gram) for i, gram in zip(inputs, grams, strict=True)]
    return corrected(out, base, terms, solver, unit, options.lambda_)
