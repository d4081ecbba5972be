"""Sums of sparsified task vectors: TIES, DARE, DELLA and model breadcrumbs.

Each method drops elements of the task vectors in its own way. The rest is added to the base by
weight, or by elected sign (TIES).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.errors import ConfigError
from moemerge.methods._sparsify import (
    Deltas,
    Sparsified,
    Thinning,
    dropping,
    ranked_dropping,
    trimming,
)
from moemerge.methods._task_vectors import (
    SumOptions,
    TaskVector,
    Thinned,
    add_elected,
    add_weighted,
)
from moemerge.methods.method import ModelTensor, UnitInfo, merge_method, param

if TYPE_CHECKING:
    from torch import Tensor


_ROUNDING = 1e-9  # allows 0.85 + 0.15


@dataclass(frozen=True)
class Election:
    """The additional options of a sum by elected sign."""

    normalize: bool = param(False, help="divide by the sum of the weights that agree in sign")
    election: str = param(
        "weighted",
        choices=("weighted", "unweighted"),
        help="what votes on an element's sign: weighted or unweighted task vectors",
    )


@dataclass(frozen=True)
class NormalisedElection(Election):
    normalize: bool = param(True, help="divide by the sum of the weights that agree in sign")


def _sum(
    inputs: Sequence[ModelTensor],
    base: Tensor,
    vectors: Sequence[TaskVector],
    options: SumOptions,
) -> Tensor:
    """Add the task vectors to the base: by elected sign if the options contain an election."""
    normalize, factor = options.normalize, options.lambda_
    if isinstance(options, Election):
        return add_elected(
            base, vectors, normalize=normalize, factor=factor, election=options.election
        )
    return add_weighted(base, vectors, normalize=normalize, factor=factor)


def _trim(
    deltas: Deltas, params: Thinned, options: SumOptions, position: int, unit: UnitInfo
) -> Thinning:
    gamma = params.gamma if isinstance(params, BreadcrumbsParams) else 0.0
    return trimming(deltas, params.density, gamma, rescale=options.rescale)


def _drop(
    deltas: Deltas, params: Thinned, options: DareLinearOptions, position: int, unit: UnitInfo
) -> Thinning:
    seed = unit.stream("dare", position)  # each model has its own mask
    return dropping(deltas, params.density, seed, rescale=options.rescaling)


def _drop_by_rank(
    deltas: Deltas, params: DellaParams, options: DellaLinearOptions, position: int, unit: UnitInfo
) -> Thinning:
    seed = unit.stream("della", position)  # each model has its own mask
    return ranked_dropping(deltas, params.density, params.epsilon, seed, rescale=options.rescaling)


TRIMMED = Sparsified(_trim, _sum)
DROPPED = Sparsified(_drop, _sum)
RANKED = Sparsified(_drop_by_rank, _sum)


@dataclass(frozen=True)
class TiesOptions(NormalisedElection, SumOptions):
    pass


@merge_method(
    "ties", base=BasePolicy.REQUIRED, per_model=Thinned, options=TiesOptions, in_runs=TRIMMED
)
def ties(
    inputs: Sequence[ModelTensor], base: Tensor, options: TiesOptions, unit: UnitInfo
) -> Tensor:
    """Keep each task vector's largest elements, elect a sign per element, average who agrees.

    Yadav et al. 2023. mergekit lets the weighted task vectors vote, the paper the unweighted ones
    (`election: unweighted`). The trim is per merge unit, not over the whole model.
    """
    return TRIMMED.whole(inputs, base, options, unit)


# --- DARE: drop at random and rescale (Yu et al. 2024, "Language models are Super Mario") ---------


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
class DareTiesOptions(Election, DareLinearOptions):
    pass


@merge_method(
    "dare_linear",
    base=BasePolicy.REQUIRED,
    per_model=Thinned,
    options=DareLinearOptions,
    in_runs=DROPPED,
)
def dare_linear(
    inputs: Sequence[ModelTensor], base: Tensor, options: DareLinearOptions, unit: UnitInfo
) -> Tensor:
    """Drop random elements of each task vector, rescale the rest, add them up by weight."""
    return DROPPED.whole(inputs, base, options, unit)


@merge_method(
    "dare_ties",
    base=BasePolicy.REQUIRED,
    per_model=Thinned,
    options=DareTiesOptions,
    in_runs=DROPPED,
)
def dare_ties(
    inputs: Sequence[ModelTensor], base: Tensor, options: DareTiesOptions, unit: UnitInfo
) -> Tensor:
    """Drop random elements of each task vector, rescale the rest, add up by elected sign."""
    return DROPPED.whole(inputs, base, options, unit)


# --- DELLA: drop by magnitude rank (Deep et al. 2024) ---------------------------------------------


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
class DellaOptions(NormalisedElection, DellaLinearOptions):
    pass


@merge_method(
    "della_linear",
    base=BasePolicy.REQUIRED,
    per_model=DellaParams,
    options=DellaLinearOptions,
    in_runs=RANKED,
)
def della_linear(
    inputs: Sequence[ModelTensor], base: Tensor, options: DellaLinearOptions, unit: UnitInfo
) -> Tensor:
    """Drop elements at random, small ones more often, rescale the rest, add up by weight."""
    return RANKED.whole(inputs, base, options, unit)


@merge_method(
    "della", base=BasePolicy.REQUIRED, per_model=DellaParams, options=DellaOptions, in_runs=RANKED
)
def della(
    inputs: Sequence[ModelTensor], base: Tensor, options: DellaOptions, unit: UnitInfo
) -> Tensor:
    """Drop elements at random, small ones more often, rescale the rest, add by elected sign."""
    return RANKED.whole(inputs, base, options, unit)


# --- model breadcrumbs: drop the largest and the smallest (Davari and Belilovsky 2024) ------------


@dataclass(frozen=True)
class BreadcrumbsParams(Thinned):
    gamma: float = param(
        0.01, minimum=0, maximum=1, help="fraction of largest elements that is dropped"
    )


@dataclass(frozen=True)
class BreadcrumbsTiesOptions(Election, SumOptions):
    pass


@merge_method(
    "breadcrumbs",
    base=BasePolicy.REQUIRED,
    per_model=BreadcrumbsParams,
    options=SumOptions,
    in_runs=TRIMMED,
)
def breadcrumbs(
    inputs: Sequence[ModelTensor], base: Tensor, options: SumOptions, unit: UnitInfo
) -> Tensor:
    """Drop each task vector's largest and smallest elements, add up the rest by weight."""
    return TRIMMED.whole(inputs, base, options, unit)


@merge_method(
    "breadcrumbs_ties",
    base=BasePolicy.REQUIRED,
    per_model=BreadcrumbsParams,
    options=BreadcrumbsTiesOptions,
    in_runs=TRIMMED,
)
def breadcrumbs_ties(
    inputs: Sequence[ModelTensor], base: Tensor, options: BreadcrumbsTiesOptions, unit: UnitInfo
) -> Tensor:
    """Drop each task vector's largest and smallest elements, add up the rest by elected sign."""
    return TRIMMED.whole(inputs, base, options, unit)
