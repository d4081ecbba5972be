"""DELLA: drop by magnitude rank (Deep et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.errors import ConfigError
from moemerge.merging.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.merging.methods._sparsify import drop_by_rank_
from moemerge.merging.methods._task_vectors import (
    ELECTION_HELP,
    TaskVector,
    Thinned,
    add_elected,
    add_weighted,
    task_vector,
)
from moemerge.merging.methods.dare import DareLinearOptions

if TYPE_CHECKING:
    from torch import Tensor


_ROUNDING = 1e-9  # allows 0.85 + 0.15


@dataclass(frozen=True)
class DellaParams(Thinned):
    epsilon: float = param(
        0.15,
        minimum=0,
        maximum=0.5,
        help="keep probability runs from density - epsilon to density + epsilon by rank",
    )

    def __post_init__(self) -> None:
        low, high = self.density - self.epsilon, self.density + self.epsilon
        if self.density < 1 and (low < -_ROUNDING or high > 1 + _ROUNDING):
            raise ConfigError(
                f"density {self.density:g} with epsilon {self.epsilon:g} makes keep probabilities "
                f"from {low:g} to {high:g}, outside [0, 1]",
                hint="lower epsilon, or set density to 1 to keep everything",
            )


@dataclass(frozen=True)
class DellaLinearOptions(DareLinearOptions):
    rescale_norm: str = param(
        "l1",
        choices=("l1", "probability"),
        help="restore the L1 norm (mergekit), or divide each by its keep probability (the paper)",
    )


@dataclass(frozen=True)
class DellaOptions(DellaLinearOptions):
    normalize: bool = param(True, help="divide by the sum of the weights that agree in sign")
    election: str = param("weighted", choices=("weighted", "unweighted"), help=ELECTION_HELP)


@merge_method(
    "della_linear", base=BasePolicy.REQUIRED, per_model=DellaParams, options=DellaLinearOptions
)
def della_linear(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: DellaLinearOptions, unit: UnitInfo
) -> Tensor:
    """Drop elements at random, small ones more often, rescale the rest, add up by weight."""
    assert base is not None
    vectors = _thinned(inputs, base, options, unit)
    return add_weighted(base, vectors, normalize=options.normalize, factor=options.lambda_)


@merge_method("della", base=BasePolicy.REQUIRED, per_model=DellaParams, options=DellaOptions)
def della(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: DellaOptions, unit: UnitInfo
) -> Tensor:
    """Drop elements at random, small ones more often, rescale the rest, add by elected sign."""
    assert base is not None
    return add_elected(
        base,
        _thinned(inputs, base, options, unit),
        normalize=options.normalize,
        factor=options.lambda_,
        election=options.election,
    )


def _thinned(
    inputs: Sequence[ModelTensor], base: Tensor, options: DellaLinearOptions, unit: UnitInfo
) -> list[TaskVector]:
    rows = base.shape[0] if base.dim() > 1 else 1  # one row per output
    vectors = [task_vector(i, base) for i in inputs]
    for position, (vector, model) in enumerate(zip(vectors, inputs, strict=True)):
        drop_by_rank_(
            vector,
            rows,
            model.params.density,
            model.params.epsilon,
            unit.stream("della", position),  # each model has its own mask
            rescale=options.rescaling,
        )
    return vectors
