"""DARE: drop at random and rescale (Yu et al. 2024, "Language models are Super Mario")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._sparsify import drop_randomly_
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
class DareLinearOptions(SumOptions):
    rescale: bool = param(True, help="rescale the kept elements to the original size")
    rescale_norm: str = param(
        "l1",
        choices=("l1", "probability"),
        help="size to restore: the measured L1 norm (mergekit), or its expectation (the paper)",
    )

    @property
    def rescaling(self) -> str | None:
        return self.rescale_norm if self.rescale else None


@dataclass(frozen=True)
class DareTiesOptions(DareLinearOptions):
    normalize: bool = param(False, help="divide by the sum of the weights that agree in sign")
    election: str = param("weighted", choices=("weighted", "unweighted"), help=ELECTION_HELP)


@merge_method("dare_linear", base=BasePolicy.REQUIRED, per_model=Thinned, options=DareLinearOptions)
def dare_linear(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: DareLinearOptions, unit: UnitInfo
) -> Tensor:
    """Drop random elements of each task vector, rescale the rest, add them up by weight."""
    assert base is not None
    vectors = _thinned(inputs, base, options, unit)
    return add_weighted(base, vectors, normalize=options.normalize, factor=options.lambda_)


@merge_method("dare_ties", base=BasePolicy.REQUIRED, per_model=Thinned, options=DareTiesOptions)
def dare_ties(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: DareTiesOptions, unit: UnitInfo
) -> Tensor:
    """Drop random elements of each task vector, rescale the rest, add up by elected sign."""
    assert base is not None
    return add_elected(
        base,
        _thinned(inputs, base, options, unit),
        normalize=options.normalize,
        factor=options.lambda_,
        election=options.election,
    )


def _thinned(
    inputs: Sequence[ModelTensor], base: Tensor, options: DareLinearOptions, unit: UnitInfo
) -> list[TaskVector]:
    vectors = [task_vector(i, base) for i in inputs]
    for position, (vector, model) in enumerate(zip(vectors, inputs, strict=True)):
        seed = unit.stream("dare", position)  # each model has its own mask
        drop_randomly_(vector, model.params.density, seed, rescale=options.rescaling)
    return vectors
