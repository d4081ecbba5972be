"""TIES: trim, elect signs, merge (Yadav et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._sparsify import trim_
from moemerge.merging.methods._task_vectors import (
    ELECTION_HELP,
    SumOptions,
    Thinned,
    add_elected,
    task_vector,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TiesOptions(SumOptions):
    normalize: bool = param(True, help="divide by the sum of the weights that agree in sign")
    election: str = param("weighted", choices=("weighted", "unweighted"), help=ELECTION_HELP)


@merge_method("ties", base=BasePolicy.REQUIRED, per_model=Thinned, options=TiesOptions)
def ties(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: TiesOptions, unit: UnitInfo
) -> Tensor:
    """Keep each task vector's largest elements, elect a sign per element, average who agrees.

    mergekit lets the weighted task vectors vote, the paper the unweighted ones
    (`election: unweighted`). The trim is per merge unit, not over the whole model.
    """
    assert base is not None
    vectors = [task_vector(i, base) for i in inputs]
    for vector, model in zip(vectors, inputs, strict=True):
        trim_(vector, model.params.density, rescale=options.rescale)
    return add_elected(
        base,
        vectors,
        normalize=options.normalize,
        factor=options.lambda_,
        election=options.election,
    )
