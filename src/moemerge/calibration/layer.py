"""One router's calibration: tensors in, tensors and measurements out, no files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moemerge.architectures.rules import Gate
from moemerge.errors import NumericalError
from moemerge.linalg.cg import Status
from moemerge.lockstep.models import joined
from moemerge.routing import (
    DomainFeatures,
    ExactResult,
    ExactSettings,
    Measured,
    RouterSolution,
    SolveSettings,
    measure_routers,
    minimise_divergence,
)
from moemerge.routing.solve import build_operator, solve_system
from moemerge.runtime.progress import counted
from moemerge.runtime.timing import Stopwatch


@dataclass(frozen=True)
class LayerProblem:
    """A merged router on the tokens of every domain, and what each domain's source would do."""

    gate: Gate
    merged: Tensor  # (K, d), or (K, d + 1) with the bias as last column
    domains: Sequence[DomainFeatures]
    holdout: Sequence[DomainFeatures]  # measured, never solved on
    dtypes: tuple[torch.dtype, torch.dtype | None]  # of the stored weight and bias
    selection_bias: Tensor | None
    source_biases: Mapping[str, Tensor | None]  # selection biases by domain


@dataclass(frozen=True)
class Agreement:
    """Figures of routing by domain, with the merged router and with the new one."""

    before: Mapping[str, Measured]
    after: Mapping[str, Measured]


@dataclass(frozen=True)
class LayerResult:
    """The new router as it will be stored, and how good it is."""

    weight: Tensor  # (K, d), stored dtype, CPU
    bias: Tensor | None  # (K,), stored dtype, CPU
    solution: RouterSolution
    exact: ExactResult | None
    agreement: Agreement
    holdout: Agreement | None
    weights: Mapping[str, float]  # how much each domain counts
    router_on_features: Agreement | None  # where the target is another: the paper's one as well

    @property
    def status(self) -> Status:
        """The first thing that went wrong, or `converged`."""
        if self.exact is not None and not self.exact.converged:
            return self.exact.status
        return self.solution.cg.status

    @property
    def message(self) -> str:
        """What `status` is about, in words."""
        if self.exact is not None and not self.exact.converged:
            return (
                f"{self.exact.status}: Newton's method ended after "
                f"{counted(self.exact.steps, 'step')}, "
                f"divergence {self.exact.kl[0]:.3g} → {self.exact.kl[-1]:.3g}"
            )
        return self.solution.cg.message

    def total(self, figure: str, by_domain: Mapping[str, Measured]) -> float:
        """A figure's sum over the domains, each as much as it counts: what is solved for."""
        return math.fsum(self.weights[n] * getattr(m, figure) for n, m in by_domain.items())

    @property
    def rise(self) -> str | None:
        """Words for a divergence that is larger than the merged router's, and what to do."""
        before, after = self.agreement.before, self.agreement.after
        kl = self.total("kl", before), self.total("kl", after)
        if kl[1] <= kl[0]:
            return None
        if self.exact is not None:  # which began no higher than the merged router
            why = "rounding to the stored dtype took more than there was to gain"
        elif self.total("quadratic", after) > self.total("quadratic", before):
            # What is solved for has a diagonal part beside it, which fell at its expense.
            why = "damping outweighs these tokens; give more text, or take `alpha` nearer to 1"
        else:
            why = 'the routers are too far apart for its quadratic model; try `objective="exact"`'
        return f"the routing divergence rose from {kl[0]:.3g} to {kl[1]:.3g}: {why}"


def calibrate_layer(
    problem: LayerProblem,
    settings: SolveSettings,
    *,
    start: Tensor,
    exact: bool = False,
    stopwatch: Stopwatch | None = None,
) -> LayerResult:
    """Solve for the router that agrees best with all sources, round it, and measure.

    `start` is where the solver begins: the answer does not depend on it, the steps do.
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
        new = joined(weight, bias).to(device)
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


def _rounded(solved: Tensor, problem: LayerProblem) -> tuple[Tensor, Tensor | None]:
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


def _agreement(problem: LayerProblem, domains: Sequence[DomainFeatures], new: Tensor) -> Agreement:
    pairs = {
        domain.name: measure_routers(
            problem.gate,
            domain,
            [problem.merged, new],
            bias=problem.selection_bias,
            target_bias=problem.source_biases[domain.name],
        )
        for domain in domains
    }
    return Agreement(
        before={name: before for name, (before, _) in pairs.items()},
        after={name: after for name, (_, after) in pairs.items()},
    )
