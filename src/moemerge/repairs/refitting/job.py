"""A refit: its request, and the job once everything that can be refused was checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from moemerge.config.repair_settings import RefitSettings
from moemerge.errors import UsageError
from moemerge.families.opened import OpenModel
from moemerge.forward.settings import stored_dtype
from moemerge.repairs.lockstep.experts import ExpertMaps, maps_json
from moemerge.repairs.lockstep.inputs import base_notices, check_source_text, read_text
from moemerge.repairs.lockstep.job import OpenedRepair, RepairJob
from moemerge.repairs.lockstep.models import PairedRouter, gate_notices, pair_routers
from moemerge.repairs.lockstep.request import RepairRequest, request_key
from moemerge.repairs.refitting.gradient import BATCH_TOKENS
from moemerge.runtime.dtypes import dtype_name
from moemerge.text.batches import Batch

SAME = "a source is a model that was merged: same layers, same experts, same width"

RefitRequest = RepairRequest[RefitSettings]


@dataclass(frozen=True, kw_only=True)
class RefitJob(RepairJob[RefitSettings]):
    """A refit that was checked and can be run."""

    layers: tuple[int, ...]
    routers: Mapping[str, PairedRouter]  # by the merged router's weight on disk

    @cached_property
    def _scales(self) -> dict[tuple[str, bool], float]:
        tokens: Counter[tuple[str, bool]] = Counter()
        for batch in self.all_batches:
            tokens[batch.domain, batch.holdout] += batch.tokens
        return {key: math.sqrt(self.weights[key[0]] / count) for key, count in tokens.items()}

    def scale(self, batch: Batch) -> float:
        """Return √(ω_i / N_i) of the batch's domain, of its calibration or its held-out rows."""
        return self._scales[batch.domain, batch.holdout]

    @property
    def batch_tokens(self) -> int:
        """Padded tokens of a batch. Gradient steps take one of every domain."""
        usual = super().batch_tokens
        return min(usual, BATCH_TOKENS) if self.by_gradient else usual

    @property
    def by_gradient(self) -> bool:
        return self.request.settings.solver == "gradient"

    @property
    def ridge(self) -> float | None:
        """λ, or None if held-out rows choose it."""
        ridge = self.request.settings.ridge
        return None if ridge == "auto" else ridge

    @property
    def key(self) -> dict[str, Any]:
        models = {name: model.checkpoint.fingerprint() for name, model in self.sources.items()}
        return {
            "job": "refit",
            "merged": self.merged.checkpoint.fingerprint(),
            "sources": models,
            "experts": maps_json(self.experts),
            **request_key(self.request, self.text.domains, self.stream.device, self.stream.dtype),
        }


def check(opened: OpenedRepair[RefitSettings]) -> None:
    """Refuse settings and sources that do not suit the merged model."""
    settings, merged = opened.request.settings, opened.merged
    if settings.requantize == "same" and merged.checkpoint.quantisation is None:
        raise UsageError(
            f'`requantize="same"`: {merged.label} is not quantised', hint="leave it out"
        )
    if settings.solver == "gradient" and settings.offload not in ("auto", "device"):
        raise UsageError(
            f'`offload="{settings.offload}"`: gradient steps read the hidden states of all tokens '
            "again and again",
            hint='leave it out, or use `solver="closed-form"`',
        )
    _require_wide_enough(merged, opened.stream.dtype)
    settings.layers.resolve(merged.architecture.num_layers)


def prepare(opened: OpenedRepair[RefitSettings]) -> RefitJob:
    """Pair the routers and read the text; refuse everything that does not match."""
    request, merged, sources = opened.request, opened.merged, opened.sources
    settings = request.settings
    layers = tuple(settings.layers.resolve(merged.architecture.num_layers))
    notices = base_notices(request, merged, sources, pruned=bool(opened.experts))
    routers = _routers(settings, merged, sources, layers, opened.experts)
    if routers:
        notices += gate_notices(merged, list(sources.values()), next(iter(routers.values())))
    text = request.text or read_text(merged, sources, request.data, settings)
    notices += [*text.notices, *check_source_text(merged, sources, text, SAME)]
    return RefitJob(
        request=request,
        merged=merged,
        sources=sources,
        stream=(
            replace(opened.stream, offload="device")
            if settings.solver == "gradient"
            else opened.stream
        ),
        ranks=opened.ranks,
        text=text,
        notices=tuple(notices),
        layers=layers,
        routers=routers,
    )


def _require_wide_enough(merged: OpenModel, dtype: torch.dtype) -> None:
    """Refuse a dtype that would round the merged weights, to which the update is added."""
    stored = stored_dtype(merged.checkpoint)
    if dtype.itemsize < stored.itemsize:
        raise UsageError(
            f"{merged.label} is stored in {dtype_name(stored)}; computing in {dtype_name(dtype)} "
            "would round the weights that are kept",
            hint=f'use `dtype="{dtype_name(stored)}"`, or convert the model first',
        )


def _routers(
    settings: RefitSettings,
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    layers: Sequence[int],
    experts: ExpertMaps,
) -> dict[str, PairedRouter]:
    family = merged.architecture.family
    if settings.router == "keep" or "router" not in settings.parts or family is None:
        return {}
    pairs = pair_routers(merged, list(sources.values()), layers, experts)
    return {pair.info.weight: pair for pair in pairs}
