"""HARC: Hessian-aware router calibration, Algorithms 1 and 2 of the paper.

The routing of source i, a router W_i with the distribution p_i = softmax(W_i x) over the experts,
costs a merged router W on the merged model's features x, to second order,

    mean over tokens of KL(p_i ‖ softmax(W x)) ≈ ½ (w − w_i)ᵀ Σ_i (w − w_i),
    Σ_i = mean H_i ⊗ x xᵀ,      H_i = diag(p_i) − p_i p_iᵀ,

and the W that costs all sources least solves a linear system (Algorithm 1):

    (Σ_i Σ_reg,i) w = Σ_i Σ_reg,i w_i,      Σ_reg,i = α Σ_i + (1 − α) diag(Σ_i).

It is solved layer by layer (Algorithm 2): x are the features of the merged model with the new
routers of all layers below.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.config.repair_settings import CalibrationSettings
from moemerge.errors import NumericalError
from moemerge.repairs.harc_report import CalibrationReport, measure, router_line, router_row, strict
from moemerge.repairs.layer import Job, Layer, repair
from moemerge.repairs.router_problem import prepare, rounded, router_problem, solver_bytes
from moemerge.routing import (
    ExactResult,
    RouterProblem,
    RouterSolution,
    Status,
    minimise_divergence,
    solve,
)
from moemerge.runtime.timing import Stopwatch


def hints(job: Job[CalibrationSettings]) -> list[str]:
    """Return advice for too little memory."""
    advice = []
    if job.runs_sources:
        advice.append('`targets="merged-features"` runs one model instead of all')
    if job.settings.preconditioner not in ("none", "jacobi"):
        advice.append('`preconditioner="jacobi"` needs no matrices')
    return advice


@repair(
    "calibrate",
    prepare=prepare,
    report=CalibrationReport,
    memory=solver_bytes,
    hints=hints,
    strict=strict,
)
def calibrate(layer: Layer, settings: CalibrationSettings) -> None:
    """Replace each router of a layer by the one that costs all sources least."""
    for router in layer.routers():
        begin = time.perf_counter()
        with layer.errors("while solving for its router", 'use `preconditioner="jacobi"`'):
            problem = router_problem(layer.job, router)  # features and targets of every source
            solved = solve_router(problem, settings, layer.job.stopwatch)
            if solved.status is Status.NON_FINITE:
                raise NumericalError(
                    f"solving for {router.name} gave values that are not finite",
                    hint="`gamma` or a router's weights are too large",
                )
            figures = measure(problem, solved.weight, layer.job.stopwatch)
        layer.replace(router.updated(solved.weight))
        seconds = time.perf_counter() - begin
        row = router_row(layer.number, router.name, problem, solved, figures, seconds)
        layer.report(row, router_line(row))
        del problem  # the features, before the layer runs on


@dataclass(frozen=True)
class SolvedRouter:
    """A new router, and how it was found."""

    weight: Tensor  # (K, d), or (K, d + 1) with the bias; float64 values that the model can store
    solution: RouterSolution
    newton: ExactResult | None  # of the exact objective

    @property
    def status(self) -> Status:
        """The first failure, or `converged`."""
        if self.newton is not None and not self.newton.converged:
            return self.newton.status
        return self.solution.status


def solve_router(
    problem: RouterProblem, settings: CalibrationSettings, stopwatch: Stopwatch | None = None
) -> SolvedRouter:
    """Solve for one router and round it as it is stored."""
    stopwatch = stopwatch or Stopwatch(problem.merged.device)
    start = problem.merged  # the solution does not depend on it, the number of steps does
    if settings.init == "zero":
        start = torch.zeros_like(start)
    elif settings.init == "average":
        start = torch.stack([domain.router for domain in problem.domains]).mean(dim=0)
    with stopwatch.span("solve"):
        solution = solve(  # by conjugate gradients
            problem.gate,
            problem.domains,
            start,
            alpha=settings.alpha,
            gamma=settings.gamma,
            curvature=settings.curvature,
            preconditioner=settings.preconditioner,
            rtol=settings.rtol,
            max_steps=settings.max_steps,
        )
        weight, newton = solution.weight, None
        if settings.objective == "exact":  # the divergence itself, by Newton's method
            newton = minimise_divergence(
                problem.gate,
                problem.domains,
                weight,
                fallback=problem.merged,
                preconditioner=settings.preconditioner,
            )
            weight = newton.weight
    return SolvedRouter(rounded(weight, problem), solution, newton)
