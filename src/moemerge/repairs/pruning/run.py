"""Prune experts: check the request, score the experts, write the model without the others."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moemerge.checkpoint import CheckpointWriter, check_output, require_space
from moemerge.checkpoint.model_card import REPORT_NAME, in_code
from moemerge.checkpoint.patch import DEFAULT_SHARD_BYTES, other_files
from moemerge.config.repair_settings import PRUNE, PruningSettings
from moemerge.errors import DataError
from moemerge.families.architecture import RouterInfo
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.known_configs import require_loadable
from moemerge.forward.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.repairs.lockstep.experts import EXPERTS, config_with_experts
from moemerge.repairs.lockstep.inputs import JobText, check_names, read_text
from moemerge.repairs.lockstep.models import MERGED, require_same_family
from moemerge.repairs.lockstep.output_files import output_files
from moemerge.repairs.lockstep.report import RepairReport
from moemerge.repairs.lockstep.request import RepairRequest
from moemerge.repairs.lockstep.streams import process_bytes
from moemerge.repairs.pruning.scores import LayerScores, score_experts
from moemerge.repairs.pruning.slicing import (
    kept_count,
    pruned_routers,
    require_sliceable,
    sliced_tensors,
)
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.process import thread_pool
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import alone, own_device
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain
from moemerge.text.rows import check_files

COPIERS = 4  # threads that copy tensors


# Sources are not run: they are measured afterwards, and repairs fit to them.
PruneRequest = RepairRequest[PruningSettings]


@dataclass(frozen=True)
class PruneJob:
    """A checked request."""

    request: PruneRequest
    model: OpenModel
    routers: tuple[RouterInfo, ...]
    count: int  # experts kept in every layer
    text: JobText
    stream: StreamSettings

    @cached_property
    def domains(self) -> tuple[Domain, ...]:
        """The rows that are scored; rows held out stay out."""
        return tuple(Domain(d.name, d.rows) for d in self.text.domains)


@dataclass(frozen=True, kw_only=True)
class PruneReport(RepairReport):
    """The part `prune` of `moemerge_report.json`."""

    repair = PRUNE

    tokens: Mapping[str, int]
    experts_before: int
    experts_after: int
    kept: Mapping[str, Sequence[int]]  # experts by layer, in the order of OUT
    scores: Mapping[str, Sequence[float]]  # of all experts by layer
    removed: Mapping[str, float]  # share of the gate weights that removed experts had, by layer

    @property
    def totals(self) -> dict[str, Any]:
        """Return the mean share of the gate weights that removed experts had."""
        return {"removed": math.fsum(self.removed.values()) / len(self.removed)}

    @property
    def card_section(self) -> str:
        return (
            f"{self.experts_after} of {self.experts_before} experts of "
            f"`{in_code(self.merged)}` were kept in each layer, by the score "
            f"`{self.settings['score']}` on {sum(self.tokens.values())} tokens. On this text the "
            f"removed experts had {self.totals['removed']:.1%} of the gate weights. "
            f"`{REPORT_NAME}` lists the kept experts."
        )

    def own_json(self) -> dict[str, Any]:
        return {
            "tokens": dict(self.tokens),
            "experts_before": self.experts_before,
            "experts_after": self.experts_after,
            EXPERTS: {layer: list(experts) for layer, experts in self.kept.items()},
            "scores": {layer: list(scores) for layer, scores in self.scores.items()},
            "removed": dict(self.removed),
        }


def run_prune(request: PruneRequest, progress: Progress) -> PruneReport:
    """Prune into `request.out`, which appears complete or not at all."""
    start = time.perf_counter()
    job = prepare(request)
    most = batch_tokens(job.model, job.stream.device)
    batches = make_batches(job.domains, batch_tokens=most)
    score = request.settings.score
    scores, stream = score_experts(job.model, batches, job.stream, job.routers, score, progress)
    kept = {router.layer: kept_experts(job, router, scores[router.layer]) for router in job.routers}
    notices = [*job.text.notices, *_unreached(scores), *_dropped(job.model)]
    for notice in notices:
        progress.note(notice)
    seconds = time.perf_counter() - start
    report = PruneReport(
        **RepairReport.run_fields(request, job.stream, stream.stopwatch, seconds),
        offload=stream.memory.offload,
        memory=process_bytes([stream.memory], 0),
        resumed=0,
        layers=(),
        notices=tuple(notices),
        tokens={domain.name: domain.tokens for domain in job.domains},
        experts_before=job.routers[0].rows,
        experts_after=job.count,
        kept={str(layer): experts for layer, experts in kept.items()},
        scores={
            str(layer): [float(f"{value:.6g}") for value in one.of(score).tolist()]
            for layer, one in scores.items()
        },
        removed={
            str(layer): 1 - float(scores[layer].gates[experts].sum() / scores[layer].gates.sum())
            for layer, experts in kept.items()
        },
    )
    _write(job, kept, report)
    return report


# --- checks -------------------------------------------------------------------------------------


def prepare(request: PruneRequest) -> PruneJob:
    """Check model, settings, output and text, before any work."""
    settings = request.settings
    alone("pruning")
    check_names(request.sources, request.data)
    check_files(request.data)
    model = open_model(MERGED, request.merged)
    for name, source in request.sources.items():
        require_same_family(model, open_model(name, source))
    count = kept_count(model, settings.keep)
    require_sliceable(model)
    require_loadable(model)
    check_output(request.out, overwrite=request.overwrite, inputs=model.checkpoint.folders)
    require_space(request.out, model.checkpoint.total_bytes)
    routers = pruned_routers(model)
    sliced_tensors(model, {r.layer: range(count) for r in routers})  # refuses unknown layouts
    text = request.text or read_text(model, request.data, request.data, settings)
    device = own_device(resolve_device(settings.device))
    stream = StreamSettings(device, forward_dtype(settings.dtype, model, device), settings.offload)
    return PruneJob(request, model, tuple(routers), count, text, stream)


# --- choice -------------------------------------------------------------------------------------


def kept_experts(job: PruneJob, router: RouterInfo, scores: LayerScores) -> list[int]:
    """Return the experts with the highest scores, ascending; the same number of each group."""
    reached = int((scores.tokens > 0).sum())
    if reached < job.count:
        raise DataError(
            f"layer {router.layer}: the text reaches {reached} of {router.rows} experts, and "
            f"{job.count} must be kept, so the others cannot be ranked",
            hint="give more text, or text of more kinds",
        )
    assert router.gate is not None
    values = scores.of(job.request.settings.score).tolist()
    groups, size = router.gate.groups, router.rows // router.gate.groups
    kept: list[int] = []
    for group in range(groups):
        members = range(group * size, (group + 1) * size)
        ranked = sorted(members, key=lambda expert: (-values[expert], expert))
        kept += sorted(ranked[: job.count // groups])
    return kept


def _unreached(scores: Mapping[int, LayerScores]) -> list[str]:
    """Return a notice if experts were removed because no token reached them."""
    missed = {layer: int((one.tokens == 0).sum()) for layer, one in scores.items()}
    total = sum(missed.values())
    if not total:
        return []
    layers = sum(count > 0 for count in missed.values())
    return [
        f"no token reaches {total} experts in {layers} layers, so they have the lowest score; "
        "other text may need them"
    ]


def _dropped(model: OpenModel) -> list[str]:
    """Return a notice if the checkpoint has layers that the model never runs."""
    layers = {model.architecture.layer_of(name) for name in model.checkpoint.tensors}
    beyond = sorted(n for n in layers if n is not None and n >= model.architecture.num_layers)
    if not beyond:
        return []
    return [
        f"layers {', '.join(map(str, beyond))} (multi-token prediction) are dropped: the model "
        "never runs them here, so their experts have no scores"
    ]


# --- output -------------------------------------------------------------------------------------


def _write(job: PruneJob, kept: Mapping[int, Sequence[int]], report: PruneReport) -> None:
    model, out = job.model, job.request.out
    tensors = sliced_tensors(model, kept)
    with CheckpointWriter(
        out,
        [tensor.info for tensor in tensors],
        shard_bytes=DEFAULT_SHARD_BYTES,
        overwrite=job.request.overwrite,
        inputs=model.checkpoint.folders,
    ) as writer:
        with thread_pool(COPIERS, "moemerge-prune") as pool:
            list(pool.map(lambda tensor: tensor.write(model, writer), tensors))
        config = json.dumps(config_with_experts(model, job.count), indent=2) + "\n"
        added = {
            "config.json": config.encode(),
            **output_files(job.request, model, report),
        }
        files = {**other_files(model.checkpoint), **model.checkpoint.companions()}
        for name, path in files.items():
            # The index of the original does not describe OUT.
            if name not in added and not name.endswith(".index.json"):
                writer.add_file(path, name)
        for name, data in added.items():
            writer.add_bytes(name, data)
        model.checkpoint.require_unchanged()
        writer.commit()
