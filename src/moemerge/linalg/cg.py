"""Preconditioned conjugate gradients, judged by the true residual.

The recurrence's own residual drifts away from b − Aw, the more so when the operator is applied in
low precision. It therefore only decides when to look: the stop test recomputes b − Aw with an
accurate operator, and when that is not small enough yet, CG starts again from it (iterative
refinement). A fast, coarse operator inside thus reaches the accuracy of the accurate one outside.

How coarse depends on the problem. Few steps forgive directions that are conjugate to a few digits
only; many do not, and go astray. The first steps may therefore be left to an operator still coarser
than the rest, which starts anew where that one has not come to an end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.linalg.operator import Identity, LinearOperator

# The recurrence stops a little below the tolerance: one more step is cheaper than a restart.
RECURRENCE_MARGIN = 0.8
# A problem that takes more steps than this is too ill-conditioned for the coarse operator.
COARSE_STEPS = 32
# A refinement that does not at least halve the true residual has reached the precision's end.
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
class CGResult:
    """A solution and the truth about it; `residuals` are the recurrence's, relative to ‖b‖."""

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
            f"({self.steps} steps, true residual {self.true_residual:.2e})"
        )


@dataclass
class _Cycle:
    """What one run of the recurrence between two true residuals found."""

    solution: Tensor
    steps: int
    residuals: list[float] = field(default_factory=list)
    failure: Status | None = None


def cg(
    operator: LinearOperator,
    rhs: Tensor,
    *,
    start: Tensor | None = None,
    preconditioner: LinearOperator | None = None,
    accurate: LinearOperator | None = None,
    coarse: LinearOperator | None = None,
    rtol: float = 1e-6,
    max_steps: int = 1000,
    check_every: int = 1,
    inner_reduction: float = 0.0,
    by_energy: bool = False,
) -> CGResult:
    """Solve A w = b for a symmetric positive definite A.

    `accurate` gives the true residual, and `coarse` serves the first COARSE_STEPS (default:
    `operator` itself). The host looks at the device only every `check_every` steps.
    `inner_reduction` ends a cycle once its residual has fallen by that factor: set it near a coarse
    operator's accuracy, beyond which its steps are wasted. `by_energy` keeps what an unfinished
    solve has come to even where its residual is larger than at the start: the energy
    ½ wᵀAw − bᵀw has fallen with every step, and a step of Newton's asks for no more.
    """
    if tuple(rhs.shape) != operator.shape:
        raise NumericalError(f"right-hand side {tuple(rhs.shape)}, operator {operator.shape}")
    b = rhs.double()
    scale = float(torch.linalg.vector_norm(b))
    w = torch.zeros_like(b) if start is None else start.to(b.device, torch.float64).clone()
    truth = accurate or operator
    if scale == 0.0:
        # Where the operator vanishes too, every w is a solution: the start is the one to keep.
        kept = start is not None and not bool(truth.mv(w).any())
        return CGResult(w if kept else torch.zeros_like(b), Status.CONVERGED, 0, (0.0,), 0.0)
    precondition = preconditioner or Identity(operator.shape, operator.device)

    r = b.clone() if start is None else b - truth.mv(w)  # A·0 needs no product
    true_residual = float(torch.linalg.vector_norm(r)) / scale
    history, steps, refinements = [true_residual], 0, -1
    status = _judge(true_residual, rtol, steps, max_steps)
    while status is None:
        target = max(RECURRENCE_MARGIN * rtol, inner_reduction * true_residual) * scale
        budget = (max_steps if coarse is None else min(COARSE_STEPS, max_steps)) - steps
        inside = coarse or operator
        cycle = _recurrence(
            inside, precondition, w, r, target=target, budget=budget, every=check_every
        )
        steps, refinements = steps + cycle.steps, refinements + 1
        history += [value / scale for value in cycle.residuals]
        before = true_residual
        candidate = b - truth.mv(cycle.solution)
        reached = float(torch.linalg.vector_norm(candidate)) / scale
        # Never hand back something worse than what we had.
        if reached < before or (by_energy and reached < float("inf")):
            w, r, true_residual = cycle.solution, candidate, reached
        gained = reached <= REFINEMENT_GAIN * before
        status = _judge(true_residual, rtol, steps, max_steps)
        if coarse is not None:  # whatever went wrong, the fine operator has its turn
            coarse = coarse if gained and steps < COARSE_STEPS else None
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


def _recurrence(
    operator: LinearOperator,
    preconditioner: LinearOperator,
    w: Tensor,
    r: Tensor,
    *,
    target: float,
    budget: int,
    every: int,
) -> _Cycle:
    """The textbook recurrence, from residual r until ‖r‖ <= target or `budget` steps.

    All scalars stay on the device; `pending` gathers them until the host looks. A failure in the
    steps not yet looked at goes back to the iterate of the last look. Directions are rounded to
    what the operator sees: w then moves by the very p that A p was computed for, and the residual
    drifts from the truth by the product's own error alone.
    """
    w, r = w.clone(), r.clone()
    y = preconditioner.mv(r)
    p = operator.representable(y).clone()
    rho = torch.sum(r * y)
    zero = torch.zeros_like(rho)
    cycle = _Cycle(solution=w.clone(), steps=0)
    pending: list[Tensor] = []
    for step in range(1, budget + 1):
        q = operator.mv(p)
        eta = torch.sum(p * q)
        # A residual of exactly zero ends in 0/0: such a step must do nothing instead.
        alpha = torch.where(rho == 0, zero, rho / eta)
        w.addcmul_(p, alpha)
        r.addcmul_(q, -alpha)
        y = preconditioner.mv(r)
        rho_next = torch.sum(r * y)
        pending.append(torch.stack([torch.linalg.vector_norm(r), eta, rho]))
        p = operator.representable(y + p * torch.where(rho == 0, zero, rho_next / rho))
        rho = rho_next
        if step % every == 0 or step == budget:
            seen = torch.stack(pending).tolist()  # the only host synchronisation
            pending.clear()
            cycle.failure = _failure(seen)
            if cycle.failure is not None:
                return cycle
            cycle.solution, cycle.steps = w.clone(), step
            cycle.residuals += [row[0] for row in seen]
            if seen[-1][0] <= target:
                break
    return cycle


def _failure(seen: list[list[float]]) -> Status | None:
    for norm, eta, rho in seen:
        if not all(abs(value) < float("inf") for value in (norm, eta, rho)):
            return Status.NON_FINITE
        if rho < 0 or (eta <= 0 and rho > 0):
            return Status.NON_POSITIVE_CURVATURE
    return None
