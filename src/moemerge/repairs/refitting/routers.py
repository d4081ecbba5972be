"""Refit one router: the exact objective on each source's own routing, or HARC's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moemerge.errors import ArchitectureError, NumericalError
from moemerge.families.architecture import RouterInfo
from moemerge.forward.stops import Stop
from moemerge.repairs.lockstep.models import StoredRouters
from moemerge.repairs.refitting.job import RefitJob
from moemerge.repairs.refitting.least_squares import concatenated
from moemerge.repairs.refitting.targets import LayerView
from moemerge.routing import DomainFeatures, RouterProblem, Status, minimise_divergence, solve

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
    best, share = _rounded(solution, problem), 1.0
    least = error(best)
    if not least < _total(before, weights):
        return merged, 0.0
    while problem.holdout and share > LEAST_SHARE:
        nearer = _rounded(torch.lerp(merged, solution, share / 2), problem)
        if not (found := error(nearer)) < least:
            break
        best, share, least = nearer, share / 2, found
    return best, share


def _rounded(weight: Tensor, problem: RouterProblem) -> Tensor:
    width, dtypes = problem.domains[0].features[0].shape[1], problem.dtypes
    parts = [weight[:, :width].to(dtypes[0]).double()]
    if dtypes[1] is not None:
        parts.append(weight[:, width:].to(dtypes[1]).double())
    rounded = torch.cat(parts, dim=1)
    if not bool(torch.isfinite(rounded).all()):
        raise NumericalError(
            f"the new router does not fit into {dtypes[0]}: it holds non-finite values",
            hint='give more text, or use `router="keep"`',
        )
    return rounded


def _total(values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return sum(weights[name] * value for name, value in values.items())


def refit_router(
    job: RefitJob, stop: Stop, place: RouterInfo, sources: Mapping[str, LayerView]
) -> tuple[RouterFit, dict[str, Tensor]]:
    """Return the fit of a router that all batches stopped at, and its new tensors by name."""
    exact = job.request.settings.router == "exact"
    pair = job.routers[place.weight]
    merged = StoredRouters(job.merged, [place]).weights(place)
    device = stop.arrivals[0].given[0].device
    theirs = {
        name: StoredRouters(job.sources[name], [info]).weights(info, pair.experts.get(name))
        for name, info in pair.sources.items()
    }
    gate = place.gate
    if gate is None:
        raise ArchitectureError(f"layer {place.layer}: no gate is known for this router")
    kept: dict[bool, list[DomainFeatures]] = {False: [], True: []}
    for name, source in theirs.items():
        matrix, logits = source.matrix.to(device), source.logits_on(device, gate)
        for holdout, domains in kept.items():
            own = [
                (a.batch, a.given[0])
                for a in stop.arrivals
                if a.batch.domain == name and a.batch.holdout == holdout
            ]
            if not own:
                continue
            targets = None
            if exact:
                states = (sources[name].record(batch).inputs[stop.path] for batch, _ in own)
                targets = [concatenated([logits(x) for x in states])]
            elif not source.is_linear:
                targets = [concatenated([logits(x) for _, x in own])]
            # Concatenated, so that a product is one kernel launch, not one per batch.
            features = [concatenated([x for _, x in own])]
            weight = job.weights[name]
            domains.append(DomainFeatures(name, features, matrix, targets, weight, job.ranks))
    bias_dtype = None if merged.bias is None else merged.bias.dtype
    dtypes = merged.weight.dtype, bias_dtype
    problem = RouterProblem(gate, merged.matrix.to(device), kept[False], kept[True], dtypes)
    fit = fit_router(problem, exact=exact)
    width, matrix = merged.weight.shape[1], fit.weight.cpu()
    bias = None if merged.bias is None else matrix[:, width]
    return fit, merged.updated(job.merged, place, matrix[:, :width], bias)
