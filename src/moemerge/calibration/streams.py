"""The merged model and, where their own routing is the target, the sources: stop by stop."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from moemerge.architectures.gates import Score
from moemerge.calibration.prepare import Prepared
from moemerge.checkpoint import format_size, require_space
from moemerge.errors import ResourceError
from moemerge.features.memory import HEADROOM, MemoryEstimate
from moemerge.features.spill import Offload
from moemerge.features.stream import RouterStream
from moemerge.lockstep.models import OpenModel
from moemerge.lockstep.streams import Lockstep
from moemerge.routing.curvature import rows_at_once
from moemerge.routing.preconditioners import Preconditioner, matrix_bytes
from moemerge.runtime.devices import available_memory
from moemerge.runtime.progress import Progress

HOST = torch.device("cpu")
# Vectors of the solver, preconditioner's scales, measured routers: all (K, d) in float64.
ROUTER_COPIES = 16


class Streams(Lockstep):
    """The merged model and the streamed sources, and whether they fit."""

    def __init__(
        self,
        merged: tuple[OpenModel, RouterStream],
        sources: Mapping[str, tuple[OpenModel, RouterStream]],
        prepared: Prepared,
    ) -> None:
        super().__init__(merged, sources)
        self._prepared = prepared

    @property
    def bytes_on_device(self) -> int:
        return needed(self.memories, self.offload, self._prepared)[0]

    def check_memory(self) -> None:
        """Refuse what does not fit, and say what to change."""
        memories, prepared = self.memories, self._prepared
        device, host = needed(memories, self.offload, prepared)
        solver = solver_bytes(prepared)
        if _fits(device, host, prepared.device):
            disk = sum(memory.on_disk for memory in memories)
            if disk:
                require_space(Path(tempfile.gettempdir()), disk)
            return
        free = int(available_memory(prepared.device) * HEADROOM)
        models = f" and {len(self.beside)} sources beside it" if self.beside else ""
        raise ResourceError(
            f"calibration needs about {format_size(device)} on {prepared.device} and "
            f"{format_size(host)} of host memory; {format_size(free)} are usable on "
            f"{prepared.device}. {self.lead.memory.describe()}{models}; the solver "
            f"{format_size(solver)}",
            hint="; ".join(advice(prepared, self.offload)),
        )


def open_streams(prepared: Prepared, progress: Progress) -> Streams:
    """Build the skeletons, and choose where activations are parked; refuses what fits nowhere."""
    wanted = prepared.request.settings.offload
    streams = _build(prepared, progress, "device" if wanted == "auto" else wanted)
    try:
        if wanted == "auto":
            kind = choose_offload(streams.memories, prepared)
            if kind != streams.offload:
                streams.close()
                streams = _build(prepared, progress, kind)
        streams.check_memory()
    except BaseException:
        streams.close()
        raise
    return streams


def _build(prepared: Prepared, progress: Progress, offload: Offload) -> Streams:
    opened: dict[str, tuple[OpenModel, RouterStream]] = {}
    try:
        for name in ("", *(prepared.sources if prepared.streams_sources else ())):
            model = prepared.sources[name] if name else prepared.merged
            stream = RouterStream(
                model.checkpoint,
                [batch for batch in prepared.batches if name in ("", batch.domain)],
                device=prepared.device,
                dtype=prepared.dtype,
                offload=offload,
                layers=prepared.layers,
                progress=None if name else progress,
            )
            opened[name] = (model, stream)
    except BaseException:
        for _, stream in opened.values():
            stream.close()
        raise
    return Streams(opened.pop(""), opened, prepared)


# --- memory -------------------------------------------------------------------------------------


def choose_offload(memories: list[MemoryEstimate], prepared: Prepared) -> Offload:
    """The nearest place with room for parked activations; the farthest where nothing fits."""
    kinds: tuple[Offload, ...] = ("device", "cpu", "disk")
    for kind in kinds:
        if kind == "cpu" and prepared.device.type == "cpu":
            continue
        if _fits(*needed(memories, kind, prepared), prepared.device):
            return kind
    return "disk"


def needed(memories: list[MemoryEstimate], offload: Offload, prepared: Prepared) -> tuple[int, int]:
    """Bytes on the device and on the host, solver included."""
    placed = [replace(memory, offload=offload) for memory in memories]
    device = sum(memory.on_device for memory in placed) + solver_bytes(prepared)
    host = sum(memory.on_host for memory in placed)
    return device, device if prepared.device.type == "cpu" else host


def _fits(device: int, host: int, where: torch.device) -> bool:
    return (
        device <= available_memory(where) * HEADROOM and host <= available_memory(HOST) * HEADROOM
    )


def solver_bytes(prepared: Prepared) -> int:
    """What the largest router's solve holds beside the features: H, targets, preconditioner."""
    tokens = sum(domain.tokens for domain in prepared.domains)
    settings = prepared.request.settings
    working = torch.float64 if prepared.dtype == torch.float64 else torch.float32
    largest = 0
    for pair in prepared.routers:
        width = prepared.merged.checkpoint.tensors[pair.place.weight].shape[1]
        experts, gate = pair.place.rows, pair.place.gate
        rows = 0 if settings.curvature == "identity" else 1  # (tokens, K) held in float32
        if rows and gate is not None and gate.score is not Score.SOFTMAX:
            rows += 1
        rows += settings.targets == "source-features"
        rows += 3 * (settings.objective == "exact")
        chunk = min(tokens, rows_at_once(prepared.device)) * (width + 4 * experts)
        kind = Preconditioner(settings.preconditioner)
        largest = max(
            largest,
            4 * rows * tokens * experts
            + 8 * (chunk + ROUTER_COPIES * experts * width)
            + matrix_bytes(kind, (experts, width), tokens, working),
        )
    return largest


def advice(prepared: Prepared, offload: Offload) -> list[str]:
    """What would make it fit, the mildest first."""
    found = []
    settings = prepared.request.settings
    if offload != "disk":
        found.append("--offload disk parks activations there")
    found.append("lower --max-tokens or --max-length")
    if prepared.streams_sources:
        found.append("--targets merged-features holds one model's layer instead of all models'")
    if settings.preconditioner not in ("none", "jacobi"):
        found.append("--preconditioner jacobi holds no matrices")
    if prepared.dtype == torch.float32:
        found.append("--dtype bfloat16 halves a layer")
    return found
