"""Calibrate one router: solve the linear system of the paper's Algorithm 1."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from moemerge.errors import DataError, UsageError
from moemerge.families.rules import Gate
from moemerge.routing.cg import CGResult, Ending, Status, cg
from moemerge.routing.curvature import DomainCurvature, RouterCurvature
from moemerge.routing.gates import Curvature
from moemerge.routing.preconditioners import BuiltPreconditioner, Preconditioner, attempts
from moemerge.routing.products import DomainFeatures

logger = logging.getLogger(__name__)

DEFAULT_ALPHA = 0.9


@dataclass(frozen=True)
class SolveSettings:
    """Solver settings. `alpha` blends Σ with its diagonal; `gamma` adds the diagonal; not both."""

    alpha: float | None = None
    gamma: float | None = None
    curvature: Curvature = Curvature.FULL
    preconditioner: Preconditioner = Preconditioner.AUTO
    rtol: float = 1e-6
    max_steps: int = 1000

    def __post_init__(self) -> None:
        if self.alpha is not None and self.gamma is not None:
            raise UsageError("alpha and gamma are two forms of one regulariser: give one of them")
        if self.alpha is not None and not 0.0 <= self.alpha <= 1.0:
            raise UsageError(f"alpha must lie in [0, 1], got {self.alpha}")
        if self.gamma is not None and not 0.0 <= self.gamma < float("inf"):
            raise UsageError(f"gamma must be a number >= 0, got {self.gamma}")
        if not 0.0 < self.rtol < 1.0:
            raise UsageError(f"rtol must lie in (0, 1), got {self.rtol}")
        if self.max_steps < 1:
            raise UsageError(f"max_steps must be at least 1, got {self.max_steps}")

    @property
    def regulariser(self) -> tuple[float, float]:
        """The coefficients (a, c) of a Σ + c diag Σ."""
        if self.gamma is not None:
            return 1.0, self.gamma
        alpha = DEFAULT_ALPHA if self.alpha is None else self.alpha
        return alpha, 1.0 - alpha


@dataclass(frozen=True)
class Trial:
    """The result of a solve with one preconditioner."""

    preconditioner: Preconditioner
    steps: int
    status: Status
    jitter: float


@dataclass(frozen=True)
class RouterSolution:
    """A new router and how it was found."""

    weight: Tensor  # (K, d) or (K, d + 1), float64, on the features' device
    cg: CGResult  # of all trials together
    trials: tuple[Trial, ...]  # in order; all but the last were abandoned

    @property
    def preconditioner(self) -> Preconditioner:
        return self.trials[-1].preconditioner

    @property
    def jitter(self) -> float:
        return self.trials[-1].jitter

    @property
    def detour(self) -> str:
        """Describe the preconditioners that failed before the last one was tried."""
        given_up = ", ".join(
            f"{t.preconditioner} ({t.status} after {t.steps} steps)" for t in self.trials[:-1]
        )
        return f"solved with {self.preconditioner}, after abandoning {given_up}"


def build_operator(
    gate: Gate, domains: Sequence[DomainFeatures], settings: SolveSettings
) -> RouterCurvature:
    """Return the curvature of all domains as an operator, after one pass over the features."""
    if not domains:
        raise DataError("no domain to calibrate on", hint="name at least one source with its data")
    shapes = {domain.name: tuple(domain.router.shape) for domain in domains}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"the sources' routers differ in shape: {listed}")
    dense, diagonal = settings.regulariser
    curvatures = [DomainCurvature(gate, domain, settings.curvature) for domain in domains]
    return RouterCurvature(curvatures, dense=dense, diagonal=diagonal)


def solve_router(
    gate: Gate,
    domains: Sequence[DomainFeatures],
    start: Tensor,
    settings: SolveSettings | None = None,
) -> RouterSolution:
    """Solve (Σ_i Σ_reg,i) w = b from `start`.

    Products are computed in float32, or in float64 for float64 features. The final residual is
    computed in float64, or by the kernels to within 3e-7 of it (`products`).
    """
    settings = settings or SolveSettings()
    return solve_system(build_operator(gate, domains, settings), start, settings)


def solve_system(
    operator: RouterCurvature, start: Tensor, settings: SolveSettings
) -> RouterSolution:
    """Solve the system of an existing operator from `start`."""
    if start.shape != operator.shape:
        raise DataError(
            f"the merged router is {tuple(start.shape)}, the sources' are {operator.shape}"
        )
    result, trials, _ = solve_in_turn(
        operator,
        operator.rhs(),
        attempts(operator, settings.preconditioner),
        Ending(settings.rtol, settings.max_steps, operator.check_every),
        start=start,
        accurate=operator.accurate(),
    )
    return RouterSolution(result.solution, result, tuple(trials))


def solve_in_turn(
    operator: RouterCurvature,
    rhs: Tensor,
    preconditioners: Iterable[BuiltPreconditioner],
    ending: Ending,
    *,
    start: Tensor | None = None,
    accurate: RouterCurvature | None = None,
) -> tuple[CGResult, list[Trial], BuiltPreconditioner]:
    """Solve with one preconditioner after another, until one is not abandoned.

    Return the result of all solves together, each one's own, and the last preconditioner.
    """
    result: CGResult | None = None
    trials: list[Trial] = []
    for built in preconditioners:
        begin = time.perf_counter()
        latest = cg(
            operator,
            rhs,
            start=start if result is None else result.solution,
            preconditioner=built.operator,
            deflation=built.deflation,
            coarse=operator.coarse(),
            accurate=accurate,
            ending=replace(ending, patience=built.patience),
        )
        trials.append(Trial(built.kind, latest.steps, latest.status, built.jitter))
        logger.debug(
            "router of %s, %s: %s after %d steps, residual %.1e, %.3f s",
            "×".join(map(str, rhs.shape)),
            built.kind,
            latest.status,
            latest.steps,
            latest.true_residual,
            time.perf_counter() - begin,
        )
        result = latest if result is None else result.followed_by(latest)
        if latest.status in (Status.CONVERGED, Status.MAX_STEPS):
            break
    assert result is not None  # there is always a preconditioner
    return result, trials, built
