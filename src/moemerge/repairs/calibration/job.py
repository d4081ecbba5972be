"""A calibration: its request, and the job once everything that can be refused was checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moemerge.config.repair_settings import CalibrationSettings
from moemerge.families.rules import Score
from moemerge.repairs.lockstep.experts import maps_json
from moemerge.repairs.lockstep.inputs import base_notices, check_source_text, read_text
from moemerge.repairs.lockstep.job import OpenedRepair, RepairJob
from moemerge.repairs.lockstep.models import (
    MERGED,
    ChosenRouters,
    PairedRouter,
    StoredRouters,
    gate_notices,
)
from moemerge.repairs.lockstep.request import RepairRequest, request_key
from moemerge.repairs.lockstep.streams import Need, Side
from moemerge.routing import Preconditioner
from moemerge.routing.preconditioners import matrix_bytes
from moemerge.routing.products import rows_at_once
from moemerge.text.domains import Domain

# With fewer tokens of a domain per feature, routers overfit: 64 tokens can be fitted exactly by any
# router of width 64. The exact objective has no damping. On tiny models it raised the divergence of
# the outputs on unseen rows by 67 % at 4 tokens per feature, and by 3 % at 54.
FEW_TOKENS = {"quadratic": 2, "exact": 32}
# Vectors of the solver, preconditioner's scales, measured routers: all (K, d) in float64.
ROUTER_COPIES = 16
MERGED_ALONE = '`targets="merged-features"` runs only the merged model'

CalibrationRequest = RepairRequest[CalibrationSettings]


@dataclass(frozen=True, kw_only=True)
class CalibrationJob(RepairJob[CalibrationSettings]):
    """A calibration that was checked and can be run."""

    routers: ChosenRouters
    stored: Mapping[str, StoredRouters]  # of the merged model and of every source

    @property
    def streams_sources(self) -> bool:
        return self.request.settings.targets == "source-features"

    @property
    def sides(self) -> dict[str, Side]:
        """Return the streamed models, the merged one first; it keeps its routers in memory."""
        sides = {MERGED: Side(self.stored[MERGED].model)}
        if self.streams_sources:
            sides |= {name: Side(source, (name,)) for name, source in self.sources.items()}
        return sides

    @property
    def key(self) -> dict[str, Any]:
        sources = {
            name: self.stored[name].digest
            + (source.checkpoint.fingerprint() if self.streams_sources else "")
            for name, source in self.sources.items()
        }
        merged = self.stored[MERGED].digest + self.merged.checkpoint.fingerprint()
        return {
            "merged": _sha256(merged),
            "sources": {name: _sha256(text) for name, text in sources.items()},
            "experts": maps_json(self.experts),
            "batch_tokens": self.batch_tokens,
            **request_key(self.request, self.text.domains, self.stream.device, self.stream.dtype),
        }


def prepare(opened: OpenedRepair[CalibrationSettings]) -> CalibrationJob:
    """Pair the routers, read them and the text; refuse everything that does not match."""
    request, merged, sources = opened.request, opened.merged, opened.sources
    settings = request.settings
    routers = ChosenRouters.of(
        merged, list(sources.values()), settings.layers, experts=opened.experts
    )
    text = request.text or read_text(merged, sources, request.data, settings)
    notices = base_notices(request, merged, sources, pruned=bool(opened.experts))
    notices += [*gate_notices(merged, list(sources.values()), routers.pairs[0]), *text.notices]
    width = merged.checkpoint.tensors[routers.pairs[0].info.weight].shape[1]
    least = FEW_TOKENS[settings.objective] * width
    notices += [word for domain in text.domains if (word := few_tokens(domain, width, least))]
    stored = {MERGED: StoredRouters(merged, [pair.info for pair in routers.pairs])}
    for name, source in sources.items():
        stored[name] = StoredRouters(source, [pair.sources[name] for pair in routers.pairs])
    if settings.targets == "merged-features" and _have_same_routers(routers.pairs, stored):
        settings, notice = _without_choice(settings)
        notices.append(notice)
    if settings.targets == "source-features":
        notices += check_source_text(merged, sources, text, MERGED_ALONE)
    return CalibrationJob(
        request=replace(request, settings=settings),
        merged=merged,
        sources=sources,
        stream=opened.stream,
        ranks=opened.ranks,
        text=text,
        notices=tuple(notices),
        routers=routers,
        stored=stored,
    )


def _have_same_routers(pairs: Sequence[PairedRouter], stored: Mapping[str, StoredRouters]) -> bool:
    """Return whether all sources have the same routers (for the model's experts)."""
    for pair in pairs:
        first, *others = (
            stored[name].weights(info, pair.experts.get(name)).matrix
            for name, info in pair.sources.items()
        )
        if not all(torch.equal(first, other) for other in others):
            return False
    return True


def _without_choice(settings: CalibrationSettings) -> tuple[CalibrationSettings, str]:
    """Return settings and a notice for sources with the same routers.

    On the merged model's features, these routers are the solution whatever the text: a quantised,
    pruned or adapted model with one source would not be calibrated at all.
    """
    same = "all sources have the same routers, which fit themselves on the merged model's features"
    if "targets" in settings.model_fields_set:
        return settings, f'{same}; `targets="source-features"` would repair their routing'
    chosen = settings.model_copy(update={"targets": "source-features"})
    return chosen, f'{same}, so the targets are the sources\' own routing ("source-features")'


def few_tokens(domain: Domain, width: int, least: int) -> str | None:
    """Return a warning if a domain has fewer tokens than `least` for routers of this width."""
    if domain.tokens >= least:
        return None
    return (
        f"{domain.name}: {domain.tokens} tokens are few for routers of width {width}. Figures "
        "measured on them say little about other text, where the result may be worse than the "
        f"merge: give at least {least}, and diagnose on other text"
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def memory_need(job: CalibrationJob) -> Need:
    """Estimate the memory of a solve besides the streams, with advice if it does not fit."""
    settings = job.request.settings
    hints = ["lower `max_tokens` or `max_length`"]
    if job.streams_sources:
        hints.append('`targets="merged-features"` streams one model instead of all')
    if settings.preconditioner not in ("none", "jacobi"):
        hints.append('`preconditioner="jacobi"` needs no matrices')
    if job.stream.dtype == torch.float32:
        hints.append('`dtype="bfloat16"` halves a layer')
    return Need("calibration", solver_bytes(job), hints)


def solver_bytes(job: CalibrationJob) -> int:
    """Return the bytes of the largest solve besides its features: H, targets, preconditioner."""
    tokens = sum(domain.tokens for domain in job.text.domains)
    settings = job.request.settings
    working = torch.float64 if job.stream.dtype == torch.float64 else torch.float32
    largest = 0
    for pair in job.routers.pairs:
        width = job.merged.checkpoint.tensors[pair.info.weight].shape[1]
        experts, gate = pair.info.rows, pair.info.gate
        rows = 0 if settings.curvature == "identity" else 1  # (tokens, K) held in float32
        if rows and gate is not None and gate.score is not Score.SOFTMAX:
            rows += 1
        rows += settings.targets == "source-features"
        rows += 3 * (settings.objective == "exact")
        chunk = min(tokens, rows_at_once(job.stream.device)) * (width + 4 * experts)
        kind = Preconditioner(settings.preconditioner)
        largest = max(
            largest,
            4 * rows * tokens * experts
            + 8 * (chunk + ROUTER_COPIES * experts * width)
            + matrix_bytes(kind, (experts, width), tokens, working),
        )
    return largest
