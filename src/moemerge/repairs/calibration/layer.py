"""Calibrate one router: tensors in, tensors and figures out, no files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.repairs.lockstep.models import with_bias_column
from moemerge.routing import (
    DomainFeatures,
    ExactResult,
    ExactSettings,
    Measured,
    RouterProblem,
    RouterSolution,
    SolveSettings,
    measure_routers,
    minimise_divergence,
)
from moemerge.routing.cg import Status
from moemerge.routing.solve import build_operator, solve_system
from moemerge.runtime.progress import counted
from moemerge.runtime.timing import Stopwatch


@dataclass(frozen=True)
class Agreement:
    """Routing figures by domain, for the merged router and for the new one."""

    before: Mapping[str, Measured]
    after: Mapping[str, Measured]


@dataclass(frozen=True)
class LayerResult:
    """The new router as stored, and its figures."""

    weight: Tensor  # (K, d), stored dtype, CPU
    bias: Tensor | None  # (K,), stored dtype, CPU
    solution: RouterSolution
    exact: ExactResult | None
    agreement: Agreement
    holdout: Agreement | None
    weights: Mapping[str, float]  # of each domain
    router_on_features: Agreement | None  # the paper's figure, if the target is another

    @property
    def status(self) -> Status:
        """The first failure, or `converged`."""
        if self.exact is not None and not self.exact.converged:
            return self.exact.status
        return self.solution.cg.status

    @property
    def message(self) -> str:
        """A description of `status`."""
        if self.exact is not None and not self.exact.converged:
            kl = self.exact.kl
            last = kl[-2] - kl[-1] if len(kl) > 1 else 0.0
            return (
                f"{self.exact.status}: Newton's method ended after "
                f"{counted(self.exact.steps, 'step')}, divergence {kl[0]:.3g} → {kl[-1]:.3g}; "
                f"the last step lowered it by {last:.1g}"
            )
        return self.solution.cg.message

    def total(self, figure: str, by_domain: Mapping[str, Measured]) -> float:
        """Return the weighted sum of a figure over the domains, which is what is minimised."""
        return math.fsum(self.weights[n] * getattr(m, figure) for n, m in by_domain.items())

    @property
    def rise(self) -> str | None:
        """A warning if the divergence is larger than the merged router's, with a remedy."""
        before, after = self.agreement.before, self.agreement.after
        kl = self.total("kl", before), self.total("kl", after)
        if kl[1] <= kl[0]:
            return None
        if self.exact is not None:  # it starts no higher than the merged router
            why = "rounding to the stored dtype took more than there was to gain"
        elif self.total("quadratic", after) > self.total("quadratic", before):
            # The objective also has a diagonal part, which fell at the expense of this one.
            why = "damping outweighs these tokens; give more text, or take `alpha` nearer to 1"
        else:
            why = 'the routers are too far apart for its quadratic model; try `objective="exact"`'
        return f"the routing divergence rose from {kl[0]:.3g} to {kl[1]:.3g}: {why}"


def calibrate_layer(
    problem: RouterProblem,
    settings: SolveSettings,
    *,
    start: Tensor,
    exact: bool = False,
    stopwatch: Stopwatch | None = None,
) -> LayerResult:
    """Solve for the router that agrees best with all sources, round it, and measure it.

    `start` is the solver's starting point: the solution does not depend on it, the number of steps
    does.
    """
    device = problem.domains[0].features[0].device
    stopwatch = stopwatch or Stopwatch(device)
    with stopwatch.span("statistics"):
        operator = build_operator(problem.gate, problem.domains, settings)
    with stopwatch.span("solve"):
        solution = solve_system(operator, start.to(device), settings)
        del operator  # the probabilities of all tokens
        solved, newton = solution.weight, None
        if exact:
            how = ExactSettings(preconditioner=settings.preconditioner)
            newton = minimise_divergence(
                problem.gate, problem.domains, solved, how, fallback=problem.merged
            )
            solved = newton.weight
    weight, bias = _rounded(solved, problem)
    with stopwatch.span("measure"):
        new = with_bias_column(weight, bias).to(device)
        on_features = [replace(d, targets=None) for d in problem.domains if d.targets is not None]
        return LayerResult(
            weight=weight,
            bias=bias,
            solution=solution,
            exact=newton,
            agreement=_agreement(problem, problem.domains, new),
            holdout=_agreement(problem, problem.holdout, new) if problem.holdout else None,
            weights={domain.name: domain.weight for domain in problem.domains},
            router_on_features=_agreement(problem, on_features, new) if on_features else None,
        )


def _rounded(solved: Tensor, problem: RouterProblem) -> tuple[Tensor, Tensor | None]:
    weight_dtype, bias_dtype = problem.dtypes
    solved = solved.cpu()
    width = problem.domains[0].features[0].shape[1]
    weight = solved[:, :width].to(weight_dtype).contiguous()
    bias = None if bias_dtype is None else solved[:, width].to(bias_dtype).contiguous()
    for part in (weight, bias):
        if part is not None and not bool(torch.isfinite(part).all()):
            raise NumericalError(
                f"the new router does not fit into {part.dtype}: it holds non-finite values",
                hint="lower `alpha` (more damping), or give more calibration text",
            )
    return weight, bias


def _agreement(problem: RouterProblem, domains: Sequence[DomainFeatures], new: Tensor) -> Agreement:
    pairs = {
        domain.name: measure_routers(
            problem.gate,
            domain,
            [problem.merged, new],
            bias=problem.selection_bias,
            target_bias=problem.source_biases.get(domain.name),
        )
        for domain in domains
    }
    return Agreement(
        before={name: before for name, (before, _) in pairs.items()},
        after={name: after for name, (_, after) in pairs.items()},
    )
