"""The models of a diagnosis, side by side over the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from moemerge.architectures.opened import OpenModel
from moemerge.checkpoint import format_size
from moemerge.diagnosis.loss import LOSS_TOKENS, NextTokenLoss
from moemerge.diagnosis.prepare import Prepared, vocabulary
from moemerge.diagnosis.results import MODEL
from moemerge.errors import ResourceError
from moemerge.features.router_stream import RouterStream
from moemerge.features.settings import StreamSettings
from moemerge.features.spill import Offload
from moemerge.lockstep.memory import choose_offload, fits, needed
from moemerge.lockstep.streams import Lockstep
from moemerge.lockstep.swapped import with_routers_of
from moemerge.runtime.progress import Progress

# Logits, scores, probabilities and masks of a batch while it is compared, all (tokens, K) float64.
COMPARED_COPIES = 24


@dataclass(frozen=True)
class Side:
    """One model as it is run: over everything, or over one domain alone."""

    model: OpenModel
    domain: str | None = None
    loss: NextTokenLoss = field(default_factory=NextTokenLoss)


@dataclass(frozen=True)
class SwappedSide(Side):
    """A model with another's routers, run on the domain of the source that is part of it."""

    weights_of: str = MODEL
    routers_of: str = MODEL


def sides_of(prepared: Prepared) -> dict[str, Side]:
    """Every model that is run, by name; the diagnosed one first."""
    sides: dict[str, Side] = {model.name: Side(model) for model in prepared.subjects}
    for name, source in prepared.sources.items():
        sides[name] = Side(source, name)
    if prepared.request.settings.swaps:
        for name, source in prepared.sources.items():
            for weights, routers in ((prepared.model, source), (source, prepared.model)):
                side = SwappedSide(
                    with_routers_of(weights, routers),
                    name,
                    weights_of=weights.name,
                    routers_of=routers.name,
                )
                sides[f"{name}: {weights.name} with the routers of {routers.name}"] = side
    return sides


def open_lockstep(prepared: Prepared, sides: dict[str, Side], progress: Progress) -> Lockstep:
    """Build the skeletons, and choose where activations are parked; refuses what fits nowhere."""
    wanted = prepared.request.settings.offload
    lockstep = _build(prepared, sides, progress, "device" if wanted == "auto" else wanted)
    extra = _compared_bytes(prepared)
    try:
        if wanted == "auto":
            kind = choose_offload(lockstep.memories, extra)
            if kind != lockstep.offload:
                lockstep.close()
                lockstep = _build(prepared, sides, progress, kind)
        _check_memory(prepared, lockstep, extra)
    except BaseException:
        lockstep.close()
        raise
    return lockstep


def _build(
    prepared: Prepared, sides: dict[str, Side], progress: Progress, offload: Offload
) -> Lockstep:
    opened: dict[str, tuple[OpenModel, RouterStream]] = {}
    try:
        for name, side in sides.items():
            stream = RouterStream(
                side.model.checkpoint,
                [batch for batch in prepared.batches if side.domain in (None, batch.domain)],
                StreamSettings(prepared.device, prepared.dtype, offload),
                layers=prepared.layers,
                output="logits",
                on_output=side.loss.add,
                progress=progress if name == MODEL else None,
            )
            opened[name] = (side.model, stream)
    except BaseException:
        for _, stream in opened.values():
            stream.close()
        raise
    return Lockstep(opened.pop(MODEL), opened)


def _compared_bytes(prepared: Prepared) -> int:
    """The larger of one batch's logits over the vocabulary and one batch's comparison."""
    largest = max(batch.input_ids.numel() for batch in prepared.batches)
    words = vocabulary(prepared.model)
    logits = largest * words * prepared.dtype.itemsize + 2 * 4 * LOSS_TOKENS * words
    experts = max(pair.place.rows for pair in prepared.routers)
    return max(logits, COMPARED_COPIES * 8 * largest * experts)


def _check_memory(prepared: Prepared, lockstep: Lockstep, extra: int) -> None:
    if fits(lockstep.memories, lockstep.offload, extra):
        return
    device, host = needed(lockstep.memories, lockstep.offload, extra)
    hints = [] if lockstep.offload == "disk" else ["--offload disk parks activations there"]
    hints.append("lower --max-tokens or --max-length")
    if prepared.request.settings.swaps:
        hints.append("--no-swaps runs half as many models")
    if len(prepared.subjects) > 1:
        hints.append("diagnose the models one by one, without --against")
    raise ResourceError(
        f"diagnosis of {len(lockstep.streams)} models side by side needs about "
        f"{format_size(device)} on {prepared.device} and {format_size(host)} of host memory. "
        f"{lockstep.lead.memory.describe()}",
        hint="; ".join(hints),
    )
