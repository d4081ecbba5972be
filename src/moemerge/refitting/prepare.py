"""Everything that can be refused, before the first layer is read.

Meanwhile a fit of no other use compiles kernels and loads libraries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moemerge.architectures.opened import OpenModel
from moemerge.config.refit import RefitSettings
from moemerge.errors import UsageError
from moemerge.features.settings import batch_tokens, forward_dtype
from moemerge.lockstep.inputs import (
    JobText,
    base_notices,
    check_same_tokens,
    read_text,
    require_streamable,
    source_weights,
)
from moemerge.lockstep.models import (
    PairedRouter,
    gate_notices,
    pair_routers,
)
from moemerge.lockstep.repairs import RepairRequest, open_models, request_key
from moemerge.lockstep.warm_up import RandomRouter, WarmUp, router_like
from moemerge.refitting.domains import DomainScales
from moemerge.refitting.ridge import Factor, fit_map
from moemerge.refitting.routers import RouterProblem, fit_router
from moemerge.refitting.sums import FitSums
from moemerge.routing.compilation import compile_kernels
from moemerge.routing.products import logits_of, working_dtype
from moemerge.runtime import ranks
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.text.batches import Batch, make_batches, own_share

SAME = "a source is a model that was merged: same layers, same experts, same width"


@dataclass(frozen=True)
class RefitRequest(RepairRequest):
    settings: RefitSettings


@dataclass(frozen=True)
class RefitJob:
    """A refit that was checked and can be run."""

    request: RefitRequest
    merged: OpenModel
    sources: Mapping[str, OpenModel]
    weights: Mapping[str, float]  # of every source, with a mean of 1
    layers: tuple[int, ...]
    routers: Mapping[str, PairedRouter]  # by the merged router's weight on disk
    text: JobText
    batches: tuple[Batch, ...]  # this rank's share
    scales: DomainScales  # of all batches
    device: torch.device
    dtype: torch.dtype
    notices: tuple[str, ...]
    key: Mapping[str, Any]  # what the result depends on: two runs with one key end alike

    @property
    def ridge(self) -> float | None:
        """λ, or None where held-out rows choose it."""
        ridge = self.request.settings.ridge
        return None if ridge == "auto" else ridge


def prepare(request: RefitRequest, warm_up: WarmUp) -> RefitJob:
    """Check names, files, models and text; make the batches. The warm-up runs meanwhile."""
    settings = request.settings
    device = ranks.own_device(resolve_device(settings.device))
    merged, sources = open_models(request, require_refittable)
    if settings.requantize == "same" and merged.checkpoint.quantisation is None:
        raise UsageError(
            f'`requantize="same"`: {merged.label} is not quantised', hint="leave it out"
        )
    dtype = forward_dtype(settings.dtype, merged)
    _require_wide_enough(merged, dtype)
    for source in sources.values():
        require_streamable(merged, source, what=f"source {source.name!r}", hint=SAME)
    layers = tuple(settings.layers.resolve(merged.architecture.num_layers))
    notices = base_notices(merged, sources, request.sources)
    routers = _routers(settings, merged, sources, layers)
    if routers:
        notices += gate_notices(merged, list(sources.values()), next(iter(routers.values())))
    exact = settings.router == "exact"
    warm_up.begin(device, lambda: fit_once(merged, device, dtype, exact=exact))
    text = request.text or read_text(merged, sources, request.data, settings)
    notices += [*text.notices, *_check_text(text, sources)]
    weights = source_weights(request.weights, sources)
    batches = make_batches(text.domains, batch_tokens=batch_tokens(merged, device))
    return RefitJob(
        request=request,
        merged=merged,
        sources=sources,
        weights=weights,
        layers=layers,
        routers=routers,
        text=text,
        batches=own_share(batches),
        scales=DomainScales.of(batches, weights),
        device=device,
        dtype=dtype,
        notices=tuple(notices),
        key={
            "job": "refit",
            "merged": merged.checkpoint.fingerprint(),
            "sources": {name: model.checkpoint.fingerprint() for name, model in sources.items()},
            **request_key(request, text.domains, device, dtype),
        },
    )


def require_refittable(merged: OpenModel) -> None:
    """Refuse what cannot be streamed in full precision."""
    merged.require_readable("dequantise it to bfloat16 first and refit that")


def _require_wide_enough(merged: OpenModel, dtype: torch.dtype) -> None:
    """New weights are the merged ones plus a step, so these must not be rounded on the way."""
    stored = forward_dtype("auto", merged)
    if dtype.itemsize < stored.itemsize:
        raise UsageError(
            f"{merged.label} is stored in {dtype_name(stored)}; computing in {dtype_name(dtype)} "
            "would round the weights that stay",
            hint=f'use `dtype="{dtype_name(stored)}"`, or convert the model first',
        )


def _routers(
    settings: RefitSettings,
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    layers: Sequence[int],
) -> dict[str, PairedRouter]:
    family = merged.architecture.family
    if settings.router == "keep" or "router" not in settings.parts or family is None:
        return {}
    return {pair.info.weight: pair for pair in pair_routers(merged, list(sources.values()), layers)}


def _check_text(text: JobText, sources: Mapping[str, OpenModel]) -> list[str]:
    """Every source reads its text as the merged model does."""
    notices: list[str] = []
    for domain in text.domains:
        source, what = sources[domain.name], f"source {domain.name!r}"
        notices += check_same_tokens([domain], text.tokenizer, source, what=what, hint=SAME)
    return notices


# --- the warm-up ----------------------------------------------------------------------------------

RIDGE = 0.1


def fit_once(model: OpenModel, device: torch.device, dtype: torch.dtype, *, exact: bool) -> None:
    """Fit a random router of the model's shape, and a map that reads what it reads."""
    router = router_like(model, device, dtype)
    if router is not None:
        compile_kernels(router.gate, router.domains[0])
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
