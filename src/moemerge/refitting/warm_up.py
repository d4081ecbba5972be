"""Fits of no other use than what they leave behind: kernels compiled, libraries loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from moemerge.architectures.opened import OpenModel
from moemerge.lockstep.warm_up import RandomRouter, router_like
from moemerge.refitting.ridge import Factor, fit_map
from moemerge.refitting.routers import RouterProblem, fit_router
from moemerge.refitting.sums import FitSums
from moemerge.routing.products import logits_of, working_dtype

RIDGE = 0.1


def fit_once(model: OpenModel, device: torch.device, dtype: torch.dtype, *, exact: bool) -> None:
    """Fit a random router of the model's shape, and a map that reads what it reads."""
    router = router_like(model, device, dtype)
    if router is not None:
        fit_router_of(router, dtype, exact=exact)
        fit_map_of(router, dtype)


def fit_router_of(router: RandomRouter, dtype: torch.dtype, *, exact: bool) -> None:
    domains = router.domains
    if exact:
        domains = [
            replace(d, targets=[logits_of(x.to(working_dtype(x)), d.router) for x in d.features])
            for d in domains
        ]
    problem = RouterProblem(router.gate, router.merged, domains, [])
    fit_router(problem, (dtype, dtype if router.has_bias else None), exact=exact)


def fit_map_of(router: RandomRouter, dtype: torch.dtype) -> None:
    (x,) = router.domains[0].features
    width, wide = x.shape[1], x.to(working_dtype(x))
    sums, held = (FitSums.empty(width, width, x.device) for _ in range(2))
    for one in (sums, held):
        one.add(x, wide, torch.full_like(wide[:, :1], 0.5))
    merged = x.new_zeros(width, width)
    fit_map(merged, sums, held, Factor(sums.gram, RIDGE), dtype)
