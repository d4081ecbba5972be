"""What a calibration solves for: the features and targets of each source at one router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moemerge.config.repair_settings import CalibrationSettings
from moemerge.errors import ArchitectureError, NumericalError
from moemerge.forward.walk import Walk
from moemerge.repairs.inputs import base_notices, check_source_text
from moemerge.repairs.layer import Job
from moemerge.repairs.routers import (
    ChosenRouters,
    Router,
    gate_notices,
    read_router,
    require_calibratable,
)
from moemerge.routing import DomainFeatures, RouterProblem, solve_bytes
from moemerge.text.domains import Domain

# With fewer tokens of a domain per feature, routers overfit: 64 tokens can be fitted exactly by any
# router of width 64. The exact objective has no damping. On tiny models it raised the divergence of
# the outputs on unseen rows by 67 % at 4 tokens per feature, and by 3 % at 54.
FEW_TOKENS = {"quadratic": 2, "exact": 32}
MERGED_ALONE = '`targets="merged-features"` runs only the merged model'


def prepare(job: Job[CalibrationSettings]) -> None:
    """Pair the routers and choose the targets; refuse models and text that do not match."""
    merged, sources, settings = job.merged, list(job.sources.values()), job.settings
    require_calibratable(merged)
    routers = ChosenRouters.of(merged, sources, settings.layers, experts=job.experts)
    job.layers, job.pairs = routers.layers, routers.pairs
    job.fields["skipped"] = routers.skipped
    job.notices += base_notices(job.request, merged, job.sources, pruned=bool(job.experts))
    job.notices += [*gate_notices(merged, sources, routers.pairs[0]), *job.text.notices]
    width = merged.checkpoint.tensors[routers.pairs[0].info.weight].shape[1]
    least = FEW_TOKENS[settings.objective] * width
    job.notices += [note for d in job.text.domains if (note := few_tokens(d, width, least))]
    same_routers = _have_same_routers(job)
    if settings.targets == "merged-features" and same_routers:
        # On the merged model's features, these routers are the solution whatever the text: a
        # quantised, pruned or adapted model with one source would not be calibrated at all.
        same = "all sources have the same routers, which fit themselves on the merged features"
        if "targets" in settings.model_fields_set:
            job.notices.append(f'{same}; `targets="source-features"` would repair their routing')
        else:
            job.change_settings(targets="source-features")
            job.notices.append(
                f'{same}, so the targets are the sources\' own routing ("source-features")'
            )
    job.runs_sources = job.settings.targets == "source-features"
    if job.runs_sources:
        job.notices += check_source_text(merged, job.sources, job.text, MERGED_ALONE)


def _have_same_routers(job: Job[CalibrationSettings]) -> bool:
    """Return whether all sources have the same routers; refuse damaged ones before any work."""
    same = True
    for pair in job.pairs:
        read_router(job.merged, pair.info)
        first, *others = (
            read_router(job.sources[name], info, pair.experts.get(name)).matrix
            for name, info in pair.sources.items()
        )
        same &= all(torch.equal(first, other) for other in others)
    return same


def few_tokens(domain: Domain, width: int, least: int) -> str | None:
    """Return a warning if a domain has fewer tokens than `least` for routers of this width."""
    if domain.tokens >= least:
        return None
    return (
        f"{domain.name}: {domain.tokens} tokens are few for routers of width {width}. Figures "
        "measured on them say little about other text, where the result may be worse than the "
        f"merge: give at least {least}, and diagnose on other text"
    )


def router_problem(job: Job[Any], router: Router) -> RouterProblem:
    """Pair the merged model's features with each source's router, or with its own routing."""
    gate, stop = router.info.gate, router.stop
    if gate is None:
        raise ArchitectureError(f"layer {router.info.layer}: no gate is known for this router")
    device = stop.weight.device
    kept: dict[bool, list[DomainFeatures]] = {False: [], True: []}
    biases: dict[str, Tensor | None] = {}
    for name in job.sources:
        source = router.source(name)
        matrix, logits = source.matrix.to(device), source.logits_on(device, gate)
        biases[name] = _moved(source.selection_bias, device)
        for holdout, domains in kept.items():
            features = stop.inputs(name, holdout=holdout)
            if not features:
                continue
            targets = None  # the source's router on the same features
            if name in router.source_stops:
                own = router.source_stops[name].inputs(name, holdout=holdout)
                targets = [logits(x) for x in own]
            elif not source.is_linear:
                targets = [logits(x) for x in features]
            weight = job.weights[name]
            domains.append(DomainFeatures(name, features, matrix, targets, weight, job.ranks))
    merged = router.merged
    return RouterProblem(
        gate=gate,
        merged=merged.matrix.to(device),
        domains=kept[False],
        holdout=kept[True],
        dtypes=(merged.weight.dtype, None if merged.bias is None else merged.bias.dtype),
        selection_bias=_moved(merged.selection_bias, device),
        source_biases=biases,
    )


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def rounded(weight: Tensor, problem: RouterProblem) -> Tensor:
    """Return a router's float64 values as the model stores them, on the same device."""
    width, dtypes = problem.domains[0].features[0].shape[1], problem.dtypes
    parts = [weight[:, :width].to(dtypes[0]).double()]
    if dtypes[1] is not None:
        parts.append(weight[:, width:].to(dtypes[1]).double())
    stored = torch.cat(parts, dim=1)
    if not bool(torch.isfinite(stored).all()):
        raise NumericalError(
            f"the new router does not fit into {dtypes[0]}: it holds non-finite values",
            hint="lower `alpha` (more damping), or give more calibration text",
        )
    return stored


def solver_bytes(job: Job[CalibrationSettings], walk: Walk) -> int:
    """Return the bytes of the largest solve besides its features: H, targets, preconditioner."""
    tokens = sum(domain.tokens for domain in job.text.domains)
    return max(
        solve_bytes(
            pair.info.gate,
            (pair.info.rows, job.merged.checkpoint.tensors[pair.info.weight].shape[1]),
            tokens,
            device=job.device,
            dtype=job.stream.dtype,
            curvature=job.settings.curvature,
            preconditioner=job.settings.preconditioner,
            targets=job.runs_sources,
            exact=job.settings.objective == "exact",
        )
        for pair in job.pairs
    )
