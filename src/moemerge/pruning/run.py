"""Prune experts: check the request, score the experts, write the model without the others."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moemerge.architectures.architecture import RouterInfo
from moemerge.architectures.opened import OpenModel, open_model
from moemerge.checkpoint import CheckpointWriter, check_output, require_space
from moemerge.checkpoint.patch import DEFAULT_SHARD_BYTES, other_files
from moemerge.config.models import ModelLike
from moemerge.errors import ArchitectureError, DataError, UsageError
from moemerge.features.known_configs import require_loadable
from moemerge.features.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.lockstep.experts import PRUNING, config_with_experts
from moemerge.lockstep.inputs import JobText, read_text, settings_data
from moemerge.lockstep.models import require_calibratable
from moemerge.pruning.scores import LayerScores, score_experts
from moemerge.pruning.settings import PruneSettings
from moemerge.pruning.slicing import require_sliceable, sliced_tensors
from moemerge.report.files import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    in_code,
    report_bytes,
    report_document,
)
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.files import read_file
from moemerge.runtime.process import thread_pool
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import own_device
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files, source_names
from moemerge.version import __version__

CARD_TITLE = "Pruned experts"
COPIERS = 4  # threads that copy tensors
# transformers scores a group by the sum of its two best experts.
SMALLEST_GROUP = {"max": 1, "top2_sum": 2}


@dataclass(frozen=True)
class PruneRequest:
    """The model, text of each domain by name, and the output folder."""

    model: ModelLike
    out: Path
    data: Mapping[str, Sequence[TextSource]]
    settings: PruneSettings
    overwrite: bool = False


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


@dataclass(frozen=True)
class PruneReport:
    """The part of pruning in `moemerge_report.json`."""

    model: str
    output: str
    data: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Any]
    device: str
    dtype: str
    memory_estimate: int  # bytes that scoring was expected to need on its device
    tokens: Mapping[str, int]
    experts_before: int
    experts_after: int
    experts: Mapping[str, Sequence[int]]  # kept experts by layer, in the order of OUT
    scores: Mapping[str, Sequence[float]]  # of all experts by layer
    removed: Mapping[str, float]  # share of the gate weights that removed experts had, by layer
    notices: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def card_section(self) -> str:
        """Markdown for the model card."""
        share = math.fsum(self.removed.values()) / len(self.removed)
        return (
            f"{self.experts_after} of {self.experts_before} experts of "
            f"`{in_code(self.model)}` were kept in each layer, by the score "
            f"`{self.settings['score']}` on {sum(self.tokens.values())} tokens. On this text the "
            f"removed experts had {share:.1%} of the gate weights. `{REPORT_NAME}` lists the kept "
            "experts."
        )


def run_prune(request: PruneRequest, progress: Progress) -> PruneReport:
    """Prune into `request.out`, which appears complete or not at all."""
    start = time.perf_counter()
    job = prepare(request)
    most = batch_tokens(job.model, job.stream.device)
    batches = make_batches(job.domains, batch_tokens=most)
    scores, memory = score_experts(job.model, batches, job.stream, job.routers, progress)
    kept = {router.layer: kept_experts(job, router, scores[router.layer]) for router in job.routers}
    notices = [*job.text.notices, *_unreached(job, scores), *_dropped(job.model)]
    for notice in notices:
        progress.note(notice)
    report = PruneReport(
        model=job.model.label,
        output=str(request.out),
        data={name: source_names(files) for name, files in request.data.items()},
        settings=settings_data(request.settings),
        device=str(job.stream.device),
        dtype=dtype_name(job.stream.dtype),
        memory_estimate=memory,
        tokens={domain.name: domain.tokens for domain in job.domains},
        experts_before=job.routers[0].rows,
        experts_after=job.count,
        experts={str(layer): experts for layer, experts in kept.items()},
        scores={
            str(layer): [float(f"{value:.6g}") for value in one.of(request.settings.score).tolist()]
            for layer, one in scores.items()
        },
        removed={
            str(layer): 1 - float(scores[layer].gates[experts].sum() / scores[layer].gates.sum())
            for layer, experts in kept.items()
        },
        notices=tuple(notices),
        seconds=time.perf_counter() - start,
    )
    _write(job, kept, report)
    return report


# --- checks -------------------------------------------------------------------------------------


def prepare(request: PruneRequest) -> PruneJob:
    """Check model, settings, output and text, before any work."""
    settings = request.settings
    if not request.data:
        raise UsageError(
            "no text is given, and experts are scored on text", hint="`data={NAME: FILE.jsonl}`"
        )
    check_files(request.data)
    model = open_model("model", request.model)
    require_calibratable(model, "prune")
    require_sliceable(model)
    require_loadable(model)
    check_output(request.out, overwrite=request.overwrite, inputs=model.checkpoint.folders)
    require_space(request.out, model.checkpoint.total_bytes)
    routers = [r for r in model.architecture.routers() if r.layer < model.architecture.num_layers]
    count = _count(model, routers, settings.keep)
    sliced_tensors(model, {r.layer: range(count) for r in routers})  # refuses unknown layouts
    text = read_text(model, request.data, request.data, settings)
    device = own_device(resolve_device(settings.device))
    stream = StreamSettings(device, forward_dtype(settings.dtype, model, device), settings.offload)
    return PruneJob(request, model, tuple(routers), count, text, stream)


def _count(model: OpenModel, routers: Sequence[RouterInfo], keep: float) -> int:
    """Return the number of experts to keep; refuse what the routing does not allow."""
    label, layers = model.label, [router.layer for router in routers]
    refused = next((r for r in routers if not r.served or r.gate is None), None)
    if refused is not None:
        raise ArchitectureError(
            f"{label}: layer {refused.layer} cannot be pruned: {refused.reason}"
        )
    if len(set(layers)) != len(layers) or len({router.rows for router in routers}) != 1:
        raise ArchitectureError(
            f"{label}: its layers have different numbers of experts or several routers, and cannot "
            "be pruned"
        )
    gate, before = routers[0].gate, routers[0].rows
    assert gate is not None
    count = math.floor(keep * before / gate.groups + 0.5) * gate.groups
    each = count // gate.groups
    if count >= before:
        raise UsageError(f"keep is {keep:g}: all {before} experts would be kept")
    if count <= gate.top_k:
        raise UsageError(
            f"keep is {keep:g}: {count} of {before} experts would remain, but each token is routed "
            f"to {gate.top_k}",
            hint=f"keep more than {gate.top_k / before:.3g}",
        )
    if each < SMALLEST_GROUP[gate.group_score] or each * gate.top_groups < gate.top_k:
        raise UsageError(
            f"keep is {keep:g}: {each} experts would remain in each of {gate.groups} groups; each "
            f"token is routed to {gate.top_k} experts of {gate.top_groups} groups",
            hint="keep more",
        )
    return count


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


def _unreached(job: PruneJob, scores: Mapping[int, LayerScores]) -> list[str]:
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
            REPORT_NAME: report_bytes(report_document(__version__, **{PRUNING: report.to_json()})),
            CARD_NAME: _card(model.checkpoint.path / CARD_NAME, report).encode(),
        }
        files = {**other_files(model.checkpoint), **model.checkpoint.companions()}
        for name, path in files.items():
            # An index or a config of the merge does not describe OUT.
            if name not in added and name != CONFIG_NAME and not name.endswith(".index.json"):
                writer.add_file(path, name)
        for name, data in added.items():
            writer.add_bytes(name, data)
        model.checkpoint.require_unchanged()
        writer.commit()


def _card(written: Path, report: PruneReport) -> str:
    """Return the model's card with a section about pruning."""
    old = f"# {report.model}\n"
    if written.is_file():
        old = read_file(written).decode("utf-8", "replace")
    made = f"Pruned with [moemerge](https://pypi.org/project/moemerge/) {__version__}."
    return f"{old.rstrip(chr(10))}\n\n## {CARD_TITLE}\n\n{made} {report.card_section}\n"
