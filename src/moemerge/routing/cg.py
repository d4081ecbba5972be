"""Preconditioned conjugate gradients with a check of the true residual.

The recurrence's residual drifts away from b − Aw, more so if the operator has low precision. It
only decides when to check. The check recomputes b − Aw with an accurate operator; if it is too
large, CG restarts from it (iterative refinement). A fast, coarse operator inside therefore reaches
the accuracy of the accurate one outside.

How coarse it may be depends on the problem. A solve of few steps tolerates preconditioned residuals
of a few digits; one of many steps does not. The first steps may therefore use a coarser operator.
If it does not finish, the finer one restarts.

The recurrence is flexible CG: each direction is made conjugate to the previous one by the computed
products, and its length is an exact line search. This tolerates a preconditioner that varies
slightly from step to step (rounding) or is not quite symmetric (deflation).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.runtime.progress import counted

# The recurrence stops slightly below the tolerance: one more step is cheaper than a restart.
RECURRENCE_MARGIN = 0.8
# A problem that takes more steps than this is too ill-conditioned for the coarse operator.
COARSE_STEPS = 32
# A refinement that does not halve the true residual has reached the limit of the precision.
REFINEMENT_GAIN = 0.5


class Status(StrEnum):
    """How a solve ended."""

    CONVERGED = "converged"
    MAX_STEPS = "max_steps"
    STAGNATED = "stagnated"
    STALLED = "stalled"
    NON_POSITIVE_CURVATURE = "non_positive_curvature"
    NON_FINITE = "non_finite"


_MESSAGES = {
    Status.CONVERGED: "the true residual is within the tolerance",
    Status.MAX_STEPS: "the tolerance was not reached within the allowed steps",
    Status.STAGNATED: "the true residual no longer falls: precision's end, or a singular system",
    Status.STALLED: "the residual falls too slowly to go on with this preconditioner",
    Status.NON_POSITIVE_CURVATURE: "the operator or the preconditioner is not positive definite",
    Status.NON_FINITE: "NaN or infinity appeared; the last finite iterate is returned",
}


@dataclass(frozen=True)
class Patience:
    """Stop a solve whose recent convergence rate predicts too many further steps.

    It has stalled if the rate of the last `window` steps predicts more than `steps` further steps.
    """

    window: int
    steps: int

    def is_over(self, residuals: Sequence[float], target: float) -> bool:
        """Return whether to stop; `residuals` has the start's and those of all steps so far."""
        if len(residuals) <= self.window or residuals[-1] <= target:
            return False
        # CG's residuals are not monotonic, so compare the best so far.
        best, before = min(residuals), min(residuals[: -self.window])
        pace = math.log(before / best) / self.window
        return pace * self.steps < math.log(best / target)


@dataclass(frozen=True)
class Resting:
    """Stop once the energy hardly decreases.

    That is if the last third of the steps (at least three) lowered it by at most `atol`, or by at
    most `rtol` of the decrease of all steps.
    """

    rtol: float
    atol: float

    def is_reached(self, gains: Sequence[float]) -> bool:
        last = max(3, len(gains) // 3)
        if len(gains) <= last:
            return False
        return sum(gains[-last:]) <= max(self.atol, self.rtol * sum(gains))


@dataclass(frozen=True)
class Ending:
    """When a solve ends, and how often the host synchronises to check.

    With `resting`, the energy ½ wᵀAw − bᵀw counts as well as the recurrence's residual, as in a
    Newton step. An unfinished solution is then kept even if its residual has grown.
    """

    rtol: float = 1e-6  # of the true residual, relative to ‖b‖
    max_steps: int = 1000
    check_every: int = 1  # steps
    patience: Patience | None = None
    resting: Resting | None = None


@dataclass(frozen=True)
class CGResult:
    """A solution and its status; `residuals` are the recurrence's, relative to ‖b‖."""

    solution: Tensor  # (K, d), float64
    status: Status
    steps: int
    residuals: tuple[float, ...]
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

    def followed_by(self, later: CGResult) -> CGResult:
        """Combine this solve with one that started from its solution."""
        return replace(
            later,
            steps=self.steps + later.steps,
            residuals=(*self.residuals, *later.residuals[1:]),
            refinements=self.refinements + later.refinements,
        )


@dataclass
class _Cycle:
    """The result of one run of the recurrence between two true residuals."""

    solution: Tensor
    steps: int
    residuals: list[float] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)  # of energy, step by step
    finished: bool = False
    failure: Status | None = None


def cg(
    operator: LinearOperator,
    rhs: Tensor,
    *,
    start: Tensor | None = None,
    preconditioner: LinearOperator | None = None,
    deflation: Deflation | None = None,
    accurate: LinearOperator | None = None,
    coarse: LinearOperator | None = None,
    ending: Ending | None = None,
) -> CGResult:
    """Solve A w = b for a symmetric positive definite A.

    `accurate` computes the true residual. `coarse` is used for the first COARSE_STEPS or, with a
    `deflation` that removes the large eigenvalues, for all steps. Both default to `operator`.
    """
    ending = ending or Ending()
    rtol, max_steps, resting = ending.rtol, ending.max_steps, ending.resting
    if tuple(rhs.shape) != operator.shape:
        raise NumericalError(f"right-hand side {tuple(rhs.shape)}, operator {operator.shape}")
    b = rhs.double()
    scale = float(torch.linalg.vector_norm(b))
    w = torch.zeros_like(b) if start is None else start.to(b.device, torch.float64).clone()
    truth = accurate or operator
    if scale == 0.0:
        # If the operator is zero too, every w is a solution: keep the start.
        kept = start is not None and not bool(truth.mv(w).any())
        return CGResult(w if kept else torch.zeros_like(b), Status.CONVERGED, 0, (0.0,), 0.0)
    recurrence = _Recurrence(
        preconditioner or Identity(operator.shape, operator.device),
        deflation,
        ending,
    )
    coarse_steps = COARSE_STEPS if deflation is None else max_steps

    r = b.clone() if start is None else b - truth.mv(w)  # A·0 = 0
    true_residual = float(torch.linalg.vector_norm(r)) / scale
    history, steps, refinements = [true_residual], 0, -1
    status = _judge(true_residual, rtol, steps, max_steps)
    while status is None:
        budget = (max_steps if coarse is None else min(coarse_steps, max_steps)) - steps
        cycle = recurrence.run(
            coarse or operator, w, r, target=RECURRENCE_MARGIN * rtol * scale, budget=budget
        )
        steps, refinements = steps + cycle.steps, refinements + 1
        history += [value / scale for value in cycle.residuals]
        before = true_residual
        candidate = b - truth.mv(cycle.solution)
        reached = float(torch.linalg.vector_norm(candidate)) / scale
        # Never return a solution worse than the start.
        if reached < before or (resting is not None and reached < float("inf")):
            w, r, true_residual = cycle.solution, candidate, reached
        gained = reached <= REFINEMENT_GAIN * before
        status = _judge(true_residual, rtol, steps, max_steps)
        if resting is not None and cycle.failure is None:
            status = Status.CONVERGED if cycle.finished else status and Status.MAX_STEPS
        stalled = cycle.failure is Status.STALLED
        if coarse is not None and not stalled:  # after any failure, try the finer operator
            coarse = coarse if gained and steps < coarse_steps else None
            continue
        status = status or cycle.failure
        if status is None and not gained:
            status = Status.STAGNATED
    return CGResult(w, status, steps, tuple(history), true_residual, max(refinements, 0))


def _judge(true_residual: float, rtol: float, steps: int, max_steps: int) -> Status | None:
    if true_residual <= rtol:
        return Status.CONVERGED
    if true_residual != true_residual or true_residual == float("inf"):
        return Status.NON_FINITE
    return Status.MAX_STEPS if steps >= max_steps else None


@dataclass(frozen=True)
class _Recurrence:
    """CG between two true residuals: its preconditioner, and when the host checks it."""

    preconditioner: LinearOperator
    deflation: Deflation | None
    ending: Ending

    def run(
        self, operator: LinearOperator, w: Tensor, r: Tensor, *, target: float, budget: int
    ) -> _Cycle:
        """Iterate from residual r until `_is_done`, for `budget` steps, or to a failure.

        All scalars stay on the device; `pending` collects them until the host checks. A failure in
        the unchecked steps returns to the iterate of the last check. Preconditioned residuals are
        rounded to the operator's input precision. w then moves by exactly the p of q = A p, and r
        drifts from the true residual only by the products' error.
        """
        patience, every = self.ending.patience, self.ending.check_every
        w, r = w.clone(), r.clone()
        cycle = _Cycle(solution=w.clone(), steps=0)
        norms = [float(torch.linalg.vector_norm(r))] if patience is not None else []
        if self.deflation is not None:  # removes the residual in its subspace
            s, q = self.deflation.corrected(operator, None, r)
            w.add_(s)
            r.sub_(q)
        p, q = torch.zeros_like(w), torch.zeros_like(w)
        eta = torch.ones((), dtype=torch.float64, device=r.device)
        pending: list[Tensor] = []
        for step in range(1, budget + 1):
            s, product = self._preconditioned(operator, r)
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
            if step % every == 0 or step == budget:
                seen = torch.stack(pending).tolist()  # the only host synchronisation
                pending.clear()
                cycle.failure = _failure(seen)
                if cycle.failure is not None:
                    return cycle
                cycle.solution, cycle.steps = w.clone(), step
                cycle.residuals += [row[0] for row in seen]
                cycle.gains += [row[3] for row in seen]
                if self._is_done(cycle, target):
                    cycle.finished = True
                    break
                if patience is not None and patience.is_over(norms + cycle.residuals, target):
                    cycle.failure = Status.STALLED
                    break
        return cycle

    def _is_done(self, cycle: _Cycle, target: float) -> bool:
        small, resting = cycle.residuals[-1] <= target, self.ending.resting
        return small if resting is None else small and resting.is_reached(cycle.gains)

    def _preconditioned(self, operator: LinearOperator, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return s = M⁻¹ r without the deflated subspace, and A s."""
        y = operator.representable(self.preconditioner.mv(r))
        if self.deflation is None:
            return y, operator.mv(y)
        return self.deflation.corrected(operator, y, r)


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


# --- operators ------------------------------------------------------------------------------------


class LinearOperator(ABC):
    """A symmetric map from (K, d) tensors to (K, d) tensors.

    A router is a (K, d) matrix, and its curvature a (K·d, K·d) matrix that is never formed. A
    preconditioner is also an operator.

    `mv` accepts any floating dtype and returns float64, whatever it computes in, so that a solver's
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


class Identity(LinearOperator):
    """The identity; as a preconditioner, none."""

    def mv(self, vector: Tensor) -> Tensor:
        return vector.double()


class Diagonal(LinearOperator):
    """Elementwise multiplication."""

    def __init__(self, values: Tensor) -> None:
        rows, columns = values.shape
        super().__init__((rows, columns), values.device)
        self.values = values.double()

    def mv(self, vector: Tensor) -> Tensor:
        return self.values * vector

    def inverse(self) -> Diagonal:
        """Return the inverse; entries that are not positive become 1."""
        positive = self.values > 0
        safe = torch.where(positive, self.values, torch.ones_like(self.values))
        return Diagonal(1.0 / safe)


class Deflation(Protocol):
    """A subspace Z on which a system is solved exactly, with A_Z⁻¹ = (ZᵀAZ)⁻¹.

    For any y (a preconditioned residual), s = y + Z A_Z⁻¹ Zᵀ (r − A y) leaves no residual in the
    subspace: Zᵀ(r − A s) = 0. CG with directions made of such s, from a start with Zᵀr = 0, does
    not see the eigenvalues of Z. The others are those of the preconditioned operator or between
    them, so the number of steps never increases.
    """

    def corrected(
        self, operator: LinearOperator, y: Tensor | None, r: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return s and A s; y is `representable`, or None for zero."""
