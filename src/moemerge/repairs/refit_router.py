"""Refit one router: the exact objective on each source's own routing, or HARC's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moemerge.repairs.router_problem import rounded
from moemerge.routing import RouterProblem, Status, minimise_divergence, solve

LEAST_SHARE = 1 / 16  # smallest share of the way to a solution that is tried


@dataclass(frozen=True)
class RouterFit:
    """A router's new matrix, and its divergence from the sources' routing before and after."""

    weight: Tensor  # (K, d [+ 1]), float64 values that the stored dtype holds
    status: Status
    steps: int
    tokens: Mapping[str, int]
    before: Mapping[str, float]
    after: Mapping[str, float]
    held_before: Mapping[str, float]
    held_after: Mapping[str, float]
    share: float  # of the way to the solution; 0: the merged router is kept

    @property
    def kept(self) -> bool:
        return self.share == 0.0


def fit_router(problem: RouterProblem, *, exact: bool) -> RouterFit:
    """Solve, then move towards the solution as far as held-out tokens gain; round as stored."""
    merged, ranks = problem.merged, problem.domains[0].ranks
    solution = solve(problem.gate, problem.domains, merged)
    status, steps, weight = solution.status, solution.steps, solution.weight
    if exact:
        newton = minimise_divergence(problem.gate, problem.domains, weight, fallback=merged)
        status, steps, weight = newton.status, newton.steps, newton.weight
    sides = problem.domains, problem.holdout
    before, held_before = (problem.divergences(side, merged) for side in sides)
    weight, share = _as_far_as_it_helps(problem, weight, held_before or before)
    after, held_after = before, held_before
    if share:
        after, held_after = (problem.divergences(side, weight) for side in sides)
    tokens = {d.name: ranks.total(d.tokens, merged.device) for d in problem.domains}
    fit = RouterFit(
        weight=weight,
        status=status,
        steps=steps,
        tokens=tokens,
        before=before,
        after=after,
        held_before=held_before,
        held_after=held_after,
        share=share,
    )
    return fit if ranks.count == 1 else ranks.broadcast_object(replace(fit, weight=weight.cpu()))


def _as_far_as_it_helps(
    problem: RouterProblem,
    solution: Tensor,
    before: Mapping[str, float],
) -> tuple[Tensor, float]:
    """Return the best point on the way to the solution for held-out tokens, and its share.

    Candidates are the solution, half the way, a quarter, and so on; the merged router if the
    solution is no better. With little text a solution overfits, and half of its update is better
    than all of it. Without held-out tokens the full solution is used.
    """
    judges = problem.holdout or problem.domains
    weights = {domain.name: domain.weight for domain in problem.domains}

    def error(weight: Tensor) -> float:
        return _total(problem.divergences(judges, weight), weights)

    merged = problem.merged
    best, share = rounded(solution, problem), 1.0
    least = error(best)
    if not least < _total(before, weights):
        return merged, 0.0
    while problem.holdout and share > LEAST_SHARE:
        nearer = rounded(torch.lerp(merged, solution, share / 2), problem)
        if not (found := error(nearer)) < least:
            break
        best, share, least = nearer, share / 2, found
    return best, share


def _total(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[name] * value for name, value in values.items())
