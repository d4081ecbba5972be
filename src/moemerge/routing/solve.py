"""Calibrate one router: solve the linear system of the paper's Algorithm 1."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.errors import DataError, UsageError
from moemerge.families.rules import Gate, Score
from moemerge.routing.cg import Identity, Jacobi, Preconditioner, Solution, Status, cg
from moemerge.routing.curvature import DomainCurvature, RouterCurvature
from moemerge.routing.gates import Curvature
from moemerge.routing.products import DomainFeatures, rows_at_once
from moemerge.routing.two_level import TwoLevel, two_level_bytes

logger = logging.getLogger(__name__)

DEFAULT_ALPHA = 0.9
PRECONDITIONERS = ("auto", "none", "jacobi", "two-level")


@dataclass(frozen=True)
class Trial:
    """The result of a solve with one preconditioner."""

    preconditioner: str
    steps: int
    status: Status


@dataclass(frozen=True, kw_only=True)
class RouterSolution(Solution):
    """A new router, (K, d) or (K, d + 1) float64, and how it was found."""

    trials: tuple[Trial, ...]  # in order; all but the last broke down
    jitter: float  # what made the last preconditioner definite

    @property
    def preconditioner(self) -> str:
        return self.trials[-1].preconditioner

    @property
    def detour(self) -> str:
        """Describe the preconditioners that failed before the last one was tried."""
        failed = ", ".join(
            f"{t.preconditioner} ({t.status} after {t.steps} steps)" for t in self.trials[:-1]
        )
        return f"solved with {self.preconditioner}, after abandoning {failed}"


def solve(
    gate: Gate,
    domains: Sequence[DomainFeatures],
    start: Tensor,
    *,
    alpha: float | None = None,
    gamma: float | None = None,
    curvature: str = Curvature.FULL,
    preconditioner: str = "auto",
    rtol: float = 1e-6,
    max_steps: int = 1000,
) -> RouterSolution:
    """Solve (Σ_i Σ_reg,i) w = Σ_i Σ_reg,i w_i from `start` until ‖b − Aw‖ ≤ `rtol` ‖b‖.

    Σ_reg,i = αΣ_i + (1 − α) diag Σ_i, or Σ_i + γ diag Σ_i. Products are computed in float32, or in
    float64 for float64 features. The final residual is computed in float64, or by the kernels to
    within 3e-7 of it (`products`).
    """
    if not 0.0 < rtol < 1.0:
        raise UsageError(f"rtol must lie in (0, 1), got {rtol}")
    if max_steps < 1:
        raise UsageError(f"max_steps must be at least 1, got {max_steps}")
    operator = system(gate, domains, alpha=alpha, gamma=gamma, curvature=curvature)
    if start.shape != operator.shape:
        raise DataError(
            f"the merged router is {tuple(start.shape)}, the sources' are {operator.shape}"
        )
    b, accurate = operator.rhs(), operator.accurate()
    trials: list[Trial] = []
    steps, refinements = 0, 0
    residuals: tuple[float, ...] = ()
    weight = start
    for one in preconditioners(operator, preconditioner):
        begin = time.perf_counter()
        result = cg(
            operator,
            b,
            start=weight,
            preconditioner=one,
            accurate=accurate,
            rtol=rtol,
            max_steps=max_steps,
            check_every=operator.check_every,
        )
        logger.debug(
            "router of %s, %s: %s, %.3f s",
            "×".join(map(str, b.shape)),
            one.kind,
            result.message,
            time.perf_counter() - begin,
        )
        trials.append(Trial(one.kind, result.steps, result.status))
        weight, steps = result.weight, steps + result.steps
        refinements += result.refinements
        residuals = (*residuals, *result.residuals[1:]) if trials[1:] else result.residuals
        if result.status in (Status.CONVERGED, Status.MAX_STEPS):
            break
    return RouterSolution(
        weight=weight,
        status=result.status,
        steps=steps,
        residuals=residuals,
        true_residual=result.true_residual,
        refinements=refinements,
        trials=tuple(trials),
        jitter=one.jitter,
    )


def system(
    gate: Gate,
    domains: Sequence[DomainFeatures],
    *,
    alpha: float | None = None,
    gamma: float | None = None,
    curvature: str = Curvature.FULL,
) -> RouterCurvature:
    """Return the matrix of `solve` as an operator, after one pass over the features."""
    if alpha is not None and gamma is not None:
        raise UsageError("alpha and gamma are two forms of one regulariser: give one of them")
    if alpha is not None and not 0.0 <= alpha <= 1.0:
        raise UsageError(f"alpha must lie in [0, 1], got {alpha}")
    if gamma is not None and not 0.0 <= gamma < math.inf:
        raise UsageError(f"gamma must be a number >= 0, got {gamma}")
    if not domains:
        raise DataError("no domain to calibrate on", hint="name at least one source with its data")
    shapes = {domain.name: tuple(domain.router.shape) for domain in domains}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"the sources' routers differ in shape: {listed}")
    alpha = DEFAULT_ALPHA if alpha is None else alpha
    dense, diagonal = (alpha, 1.0 - alpha) if gamma is None else (1.0, gamma)
    curvatures = [DomainCurvature(gate, domain, Curvature(curvature)) for domain in domains]
    return RouterCurvature(curvatures, dense=dense, diagonal=diagonal)


def preconditioners(operator: RouterCurvature, kind: str) -> Iterator[Preconditioner]:
    """Yield the preconditioners to try in turn; each is built when it is reached.

    "auto" is the two-level method, and Jacobi if that breaks down.
    """
    if kind not in PRECONDITIONERS:
        listed = ", ".join(PRECONDITIONERS)
        raise UsageError(f"unknown preconditioner {kind!r}", hint=f"one of {listed}")
    if kind == "none":
        yield Identity()
    if kind == "two-level" or (kind == "auto" and operator.dense > 0.0):
        yield TwoLevel(operator)
    if kind in ("jacobi", "auto"):
        yield Jacobi(operator.diagonal())


# Vectors of the solver, preconditioner's scales, measured routers: all (K, d) in float64.
ROUTER_COPIES = 16


def solve_bytes(
    gate: Gate | None,
    shape: tuple[int, int],
    tokens: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    curvature: str = Curvature.FULL,
    preconditioner: str = "auto",
    targets: bool = False,
    exact: bool = False,
) -> int:
    """Estimate the memory of a solve besides its features: H, targets, and the preconditioner."""
    experts, width = shape
    rows = 0 if curvature == Curvature.IDENTITY else 1  # (tokens, K) held in float32
    if rows and gate is not None and gate.score is not Score.SOFTMAX:
        rows += 1
    rows += targets + 3 * exact
    chunk = min(tokens, rows_at_once(device)) * (width + 4 * experts)
    held = 4 * rows * tokens * experts + 8 * (chunk + ROUTER_COPIES * experts * width)
    if preconditioner in ("none", "jacobi"):
        return held
    return held + two_level_bytes(shape, tokens, 8 if dtype == torch.float64 else 4)
