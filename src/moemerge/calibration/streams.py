"""The merged model and, where their own routing is the target, the sources: stop by stop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from moemerge.architectures.gates import Score
from moemerge.architectures.opened import OpenModel
from moemerge.calibration.prepare import Prepared
from moemerge.checkpoint import format_size, require_space
from moemerge.errors import ResourceError
from moemerge.features.memory import HEADROOM
from moemerge.features.router_stream import RouterStream
from moemerge.features.settings import StreamSettings
from moemerge.features.spill import Offload
from moemerge.lockstep.memory import choose_offload, fits, needed
from moemerge.lockstep.streams import Lockstep
from moemerge.routing.curvature import rows_at_once
from moemerge.routing.preconditioners import Preconditioner, matrix_bytes
from moemerge.runtime.devices import available_memory
from moemerge.runtime.progress import Progress
from moemerge.runtime.timing import Stopwatch

# Vectors of the solver, preconditioner's scales, measured routers: all (K, d) in float64.
ROUTER_COPIES = 16
# Python, torch and transformers themselves, threads' heaps, kernels that oneDNN keeps: measured.
PROCESS_BYTES = 512 * 2**20


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
        self.stopwatch = merged[1].stopwatch

    @property
    def bytes_on_device(self) -> int:
        """What the device will hold of this process at the most."""
        own = PROCESS_BYTES if self._prepared.device.type == "cpu" else 0
        return own + needed(self.memories, self.offload, solver_bytes(self._prepared))[0]

    def check_memory(self) -> None:
        """Refuse what does not fit, and say what to change."""
        memories, prepared = self.memories, self._prepared
        solver = solver_bytes(prepared)
        if fits(memories, self.offload, solver):
            disk = sum(memory.on_disk for memory in memories)
            if disk:
                require_space(Path(tempfile.gettempdir()), disk)
            return
        device, host = needed(memories, self.offload, solver)
        free = int(available_memory(prepared.device) * HEADROOM)
        models = f" and {len(self.beside)} sources beside it" if self.beside else ""
        raise ResourceError(
            f"calibration needs about {format_size(device)} on {prepared.device} and "
            f"{format_size(host)} of host memory; {format_size(free)} are usable on "
            f"{prepared.device}. {self.lead.memory.describe()}{models}; the solver "
            f"{format_size(solver)}",
            hint="; ".join(advice(prepared, self.offload)),
        )


def open_streams(
    prepared: Prepared, progress: Progress, settle: Callable[[], None] = lambda: None
) -> Streams:
    """Build the skeletons, and choose where activations are parked; refuses what fits nowhere.

    `settle` waits for what holds some of the device for a while; it is called if that is missed.
    """
    wanted = prepared.request.settings.offload
    streams = _build(prepared, progress, "device" if wanted == "auto" else wanted)
    try:
        if not fits(streams.memories, streams.offload, solver_bytes(prepared)):
            settle()
        if wanted == "auto":
            kind = choose_offload(streams.memories, solver_bytes(prepared))
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
    stopwatch = Stopwatch(prepared.device)
    try:
        for name in ("", *(prepared.sources if prepared.streams_sources else ())):
            model = prepared.sources[name] if name else prepared.merged
            stream = RouterStream(
                model.checkpoint,
                [batch for batch in prepared.batches if name in ("", batch.domain)],
                StreamSettings(prepared.device, prepared.dtype, offload),
                layers=prepared.layers,
                progress=None if name else progress,
                stopwatch=stopwatch,
            )
            opened[name] = (model, stream)
    except BaseException:
        for _, stream in opened.values():
            stream.close()
        raise
    return Streams(opened.pop(""), opened, prepared)


# --- memory -------------------------------------------------------------------------------------


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
