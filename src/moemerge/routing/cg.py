"""Preconditioned conjugate gradients with a check of the true residual.

The recurrence's residual drifts away from b − Aw, more so if the operator has low precision. It
only decides when to check. The check recomputes b − Aw with an accurate operator; if it is too
large, CG restarts from it (iterative refinement). A fast operator inside therefore reaches the
accuracy of the accurate one outside.

The recurrence is flexible CG: each direction is made conjugate to the previous one by the computed
products, and its length is an exact line search. This tolerates a preconditioner that varies
slightly from step to step (rounding) or is not quite symmetric (the two-level method).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.runtime.progress import counted

# The recurrence stops slightly below the tolerance: one more step is cheaper than a restart.
RECURRENCE_MARGIN = 0.8
# A refinement that does not halve the true residual has reached the limit of the precision.
REFINEMENT_GAIN = 0.5


class Status(StrEnum):
    """How a solve ended."""

    CONVERGED = "converged"
    MAX_STEPS = "max_steps"
    STAGNATED = "stagnated"
    NON_POSITIVE_CURVATURE = "non_positive_curvature"
    NON_FINITE = "non_finite"


_MESSAGES = {
    Status.CONVERGED: "the true residual is within the tolerance",
    Status.MAX_STEPS: "the tolerance was not reached within the allowed steps",
    Status.STAGNATED: "the true residual no longer falls: precision's end, or a singular system",
    Status.NON_POSITIVE_CURVATURE: "the operator or the preconditioner is not positive definite",
    Status.NON_FINITE: "NaN or infinity appeared; the last finite iterate is returned",
}


@dataclass(frozen=True)
class Solution:
    """A solution and its status; `residuals` are the recurrence's, relative to ‖b‖."""

    weight: Tensor  # (K, d), float64
    status: Status
    steps: int
    residuals: tuple[float, ...]  # of the start and of every step
    true_residual: float
    refinements: int = 0

    @property
    def converged(self) -> bool:
        return self.status is Status.CONVERGED

    @property
    def message(self) -> str:
        return (
            f"{self.status}: {_MESSAGES[self.status]} "
            f"({counted(self.steps, 'step')}, true residual {self.true_residual:.2e})"
        )


def cg(
    operator: LinearOperator,
    b: Tensor,
    *,
    start: Tensor | None = None,
    preconditioner: Preconditioner | None = None,
    accurate: LinearOperator | None = None,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    check_every: int = 1,
    at_rest: Callable[[Sequence[float]], bool] | None = None,
) -> Solution:
    """Solve A w = b for a symmetric positive definite A until ‖b − Aw‖ ≤ `rtol` ‖b‖.

    `accurate` computes the true residual (default: `operator`). The host synchronises with the
    device every `check_every` steps. With `at_rest`, a solve ends when the recurrence's residual is
    within `rtol` and `at_rest` accepts the decreases of the energy ½ wᵀAw − bᵀw in all steps, as
    in a Newton step. An unfinished solution is then kept even if its residual has grown.
    """
    if tuple(b.shape) != operator.shape:
        raise NumericalError(f"right-hand side {tuple(b.shape)}, operator {operator.shape}")
    b = b.double()
    scale = float(torch.linalg.vector_norm(b))
    w = torch.zeros_like(b) if start is None else start.to(b.device, torch.float64).clone()
    truth = accurate or operator
    preconditioner = preconditioner or Identity()
    if scale == 0.0:
        # If the operator is zero too, every w is a solution: keep the start.
        kept = start is not None and not bool(truth.mv(w).any())
        return Solution(w if kept else torch.zeros_like(b), Status.CONVERGED, 0, (0.0,), 0.0)

    r = b.clone() if start is None else b - truth.mv(w)  # A·0 = 0
    true_residual = float(torch.linalg.vector_norm(r)) / scale
    residuals, steps, refinements = [true_residual], 0, -1
    status = _judged(true_residual, rtol, steps, max_steps)
    while status is None:
        run = _recur(
            operator, preconditioner, w, r, RECURRENCE_MARGIN * rtol * scale, max_steps - steps,
            check_every, at_rest,
        )  # fmt: skip
        steps, refinements = steps + run.steps, refinements + 1
        residuals += [value / scale for value in run.residuals]
        before = true_residual
        candidate = b - truth.mv(run.solution)
        reached = float(torch.linalg.vector_norm(candidate)) / scale
        # Never return a solution worse than the start.
        if reached < before or (at_rest is not None and reached < float("inf")):
            w, r, true_residual = run.solution, candidate, reached
        status = _judged(true_residual, rtol, steps, max_steps)
        if at_rest is not None and run.failure is None:
            status = Status.CONVERGED if run.finished else status and Status.MAX_STEPS
        status = status or run.failure
        if status is None and reached > REFINEMENT_GAIN * before:
            status = Status.STAGNATED
    return Solution(w, status, steps, tuple(residuals), true_residual, max(refinements, 0))


def _judged(true_residual: float, rtol: float, steps: int, max_steps: int) -> Status | None:
    if true_residual <= rtol:
        return Status.CONVERGED
    if true_residual != true_residual or true_residual == float("inf"):
        return Status.NON_FINITE
    return Status.MAX_STEPS if steps >= max_steps else None


@dataclass
class _Run:
    """The recurrence between two true residuals."""

    solution: Tensor
    steps: int = 0
    residuals: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)  # of energy, step by step
    finished: bool = False
    failure: Status | None = None


def _recur(
    operator: LinearOperator,
    preconditioner: Preconditioner,
    w: Tensor,
    r: Tensor,
    target: float,
    budget: int,
    check_every: int,
    at_rest: Callable[[Sequence[float]], bool] | None,
) -> _Run:
    """Iterate from residual r until it is within `target`, for `budget` steps, or to a failure.

    All scalars stay on the device; `pending` collects them until the host checks. A failure in the
    unchecked steps returns to the iterate of the last check.
    """
    w, r = w.clone(), r.clone()
    run = _Run(solution=w.clone())
    first = preconditioner.first(operator, r)
    if first is not None:
        w.add_(first[0])
        r.sub_(first[1])
    p, q = torch.zeros_like(w), torch.zeros_like(w)
    eta = torch.ones((), dtype=torch.float64, device=r.device)
    pending: list[Tensor] = []
    for step in range(1, budget + 1):
        s, product = preconditioner.direction(operator, r)
        rho = torch.sum(r * s)
        beta = -_ratio(torch.sum(s * q), eta)
        p = torch.addcmul(s, p, beta)
        q = torch.addcmul(product, q, beta)
        eta = torch.sum(p * q)
        slope = torch.sum(p * r)
        length = _ratio(slope, eta)
        w.addcmul_(p, length)
        r.addcmul_(q, -length)
        norm = torch.linalg.vector_norm(r)
        pending.append(torch.stack([norm, eta, rho, 0.5 * length * slope]))
        if step % check_every and step != budget:
            continue
        seen = torch.stack(pending).tolist()  # the only host synchronisation
        pending.clear()
        run.failure = _failure(seen)
        if run.failure is not None:
            return run
        run.solution, run.steps = w.clone(), step
        run.residuals += [row[0] for row in seen]
        run.gains += [row[3] for row in seen]
        if run.residuals[-1] <= target and (at_rest is None or at_rest(run.gains)):
            run.finished = True
            return run
    return run


def _ratio(one: Tensor, other: Tensor) -> Tensor:
    """Return one / other, and 0 for 0 / 0, which ends a solve with residual zero."""
    return torch.where(one == 0, torch.zeros_like(one), one / other)


def _failure(seen: list[list[float]]) -> Status | None:
    for norm, eta, rho, _ in seen:
        if not all(abs(value) < float("inf") for value in (norm, eta, rho)):
            return Status.NON_FINITE
        if rho < 0 or (eta <= 0 and rho > 0):
            return Status.NON_POSITIVE_CURVATURE
    return None


# --- operators and preconditioners ----------------------------------------------------------------


class LinearOperator(ABC):
    """A symmetric map from (K, d) tensors to (K, d) tensors.

    A router is a (K, d) matrix, and its curvature a (K·d, K·d) matrix that is never formed. `mv`
    accepts any floating dtype and returns float64, whatever it computes in, so that a solver's
    vectors keep their precision.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        self.device = device

    @abstractmethod
    def mv(self, vector: Tensor) -> Tensor:
        """Apply the operator to a (K, d) tensor."""

    def representable(self, vector: Tensor) -> Tensor:
        """Round `vector` to the input precision of `mv`.

        If a solver rounds its directions so, an operator of low precision adds no input error.
        """
        return vector


class Preconditioner(ABC):
    """An approximate inverse M⁻¹ of an operator A."""

    kind: str
    jitter = 0.0  # what made it definite

    @abstractmethod
    def direction(self, operator: LinearOperator, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return s = M⁻¹ r, rounded to the operator's input precision, and A s."""

    def first(self, operator: LinearOperator, r: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return a correction of the start and its product with A, or None."""
        return None


class Identity(Preconditioner):
    """None."""

    kind = "none"

    def direction(self, operator: LinearOperator, r: Tensor) -> tuple[Tensor, Tensor]:
        s = operator.representable(r)
        return s, operator.mv(s)


class Jacobi(Preconditioner):
    """The operator's diagonal; entries that are not positive count as 1."""

    kind = "jacobi"

    def __init__(self, diagonal: Tensor) -> None:
        diagonal = diagonal.double()
        self.inverse = 1.0 / torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal))

    def direction(self, operator: LinearOperator, r: Tensor) -> tuple[Tensor, Tensor]:
        s = operator.representable(self.inverse * r)
        return s, operator.mv(s)
