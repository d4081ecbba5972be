"""Model breadcrumbs: drop the largest and the smallest (Davari and Belilovsky 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._sparsify import trim_both_ends_
from moemerge.merging.methods._task_vectors import (
    ELECTION_HELP,
    SumOptions,
    TaskVector,
    Thinned,
    add_elected,
    add_weighted,
    task_vector,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BreadcrumbsParams(Thinned):
    gamma: float = param(
        0.01, minimum=0, maximum=1, help="fraction of largest elements that is dropped"
    )


@dataclass(frozen=True)
class BreadcrumbsTiesOptions(SumOptions):
    normalize: bool = param(False, help="divide by the sum of the weights that agree in sign")
    election: str = param("weighted", choices=("weighted", "unweighted"), help=ELECTION_HELP)


@merge_method(
    "breadcrumbs", base=BasePolicy.REQUIRED, per_model=BreadcrumbsParams, options=SumOptions
)
def breadcrumbs(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: SumOptions, unit: UnitInfo
) -> Tensor:
    """Drop each task vector's largest and smallest elements, add up the rest by weight."""
    assert base is not None
    vectors = _thinned(inputs, base, options)
    return add_weighted(base, vectors, normalize=options.normalize, factor=options.lambda_)


@merge_method(
    "breadcrumbs_ties",
    base=BasePolicy.REQUIRED,
    per_model=BreadcrumbsParams,
    options=BreadcrumbsTiesOptions,
)
def breadcrumbs_ties(
    inputs: Sequence[ModelTensor],
    base: Tensor | None,
    options: BreadcrumbsTiesOptions,
    unit: UnitInfo,
) -> Tensor:
    """Drop each task vector's largest and smallest elements, add up the rest by elected sign."""
    assert base is not None
    return add_elected(
        base,
        _thinned(inputs, base, options),
        normalize=options.normalize,
        factor=options.lambda_,
        election=options.election,
    )


def _thinned(inputs: Sequence[ModelTensor], base: Tensor, options: SumOptions) -> list[TaskVector]:
    vectors = [task_vector(i, base) for i in inputs]
    for vector, model in zip(vectors, inputs, strict=True):
        p = model.params
        trim_both_ends_(vector, p.density, p.gamma, rescale=options.rescale)
    return vectors
