"""Several models side by side, router by router: at the same place, on the same tokens."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from torch import Tensor

from moemerge.architectures.opened import OpenModel
from moemerge.checkpoint import format_size, require_space
from moemerge.errors import ArchitectureError, ResourceError
from moemerge.features.router_stream import RouterStop, RouterStream
from moemerge.features.settings import (
    HEADROOM,
    MemoryEstimate,
    StreamSettings,
    fits,
    nearest_offload,
    needed,
)
from moemerge.features.spill import Offload
from moemerge.runtime.devices import available_memory
from moemerge.runtime.progress import Progress
from moemerge.runtime.timing import Stopwatch
from moemerge.text.batches import Batch

logger = logging.getLogger(__name__)

# Python, torch and transformers themselves, threads' heaps, kernels that oneDNN keeps: measured.
PROCESS_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Side:
    """One model as it is run: over everything, or over one domain alone."""

    model: OpenModel
    domain: str | None = None

    @property
    def on_output(self) -> Callable[[Batch, Tensor], None] | None:
        """Gets each batch's logits, where they are wanted."""
        return None


@dataclass(frozen=True)
class Stops:
    """All models wait at one router."""

    lead: RouterStop
    others: Mapping[str, RouterStop]


class Lockstep:
    """Iterate to get the leading model's stop, and every other model's at the same router.

    Another model may run over fewer batches than the leader: its own domain's alone.
    """

    def __init__(
        self,
        lead: tuple[OpenModel, RouterStream],
        others: Mapping[str, tuple[OpenModel, RouterStream]],
    ) -> None:
        self.model, self.lead = lead
        self.others = others

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def streams(self) -> list[RouterStream]:
        """All of them, the leader first."""
        return [self.lead, *(stream for _, stream in self.others.values())]

    @property
    def stopwatch(self) -> Stopwatch:
        return self.lead.stopwatch

    @property
    def offload(self) -> Offload:
        return self.lead.memory.offload

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def __iter__(self) -> Iterator[Stops]:
        others = {name: (model, iter(stream)) for name, (model, stream) in self.others.items()}
        for stop in self.lead:
            yield Stops(
                stop,
                {
                    name: self._same_router(stop, name, model, next(stops, None))
                    for name, (model, stops) in others.items()
                },
            )
        for name, (model, stops) in others.items():  # on to their end, where output waits
            extra = next(stops, None)
            if extra is not None:
                raise self._apart("its end", name, model, extra.weight_name)

    def _same_router(
        self, stop: RouterStop, name: str, model: OpenModel, other: RouterStop | None
    ) -> RouterStop:
        key = self.model.architecture.key(stop.weight_name)
        if other is None or model.architecture.key(other.weight_name) != key:
            there = "its end" if other is None else other.weight_name
            raise self._apart(stop.weight_name, name, model, there)
        return other

    def _apart(self, here: str, name: str, model: OpenModel, there: str) -> ArchitectureError:
        return ArchitectureError(
            f"{self.model.label} is at {here}, {name!r} ({model.label}) at {there}",
            hint="the models' config.json must describe the same structure",
        )

    @property
    def memory(self) -> list[MemoryEstimate]:
        """Of each model."""
        return [stream.memory for stream in self.streams]

    def process_bytes(self, extra: int) -> int:
        """What the device will hold of this process at the most."""
        own = PROCESS_BYTES if self.lead.device.type == "cpu" else 0
        return own + needed(self.memory, extra)[0]


@dataclass(frozen=True)
class Need:
    """What a job does with the features: bytes on the device, and words for who has too few."""

    job: str  # "calibration"
    extra: int
    hints: Sequence[str]  # what would make it fit, the mildest first


def open_lockstep(
    sides: Mapping[str, Side],
    batches: Sequence[Batch],
    settings: StreamSettings,
    *,
    layers: Collection[int],
    need: Need,
    progress: Progress,
    settle: Callable[[], None] = lambda: None,
) -> Lockstep:
    """Build the skeletons (the first side leads), and choose where activations are parked.

    Refuses what fits nowhere. `settle` waits for what holds some of the device for a while; it is
    called if that is missed.
    """

    def build(offload: Offload) -> Lockstep:
        chosen = replace(settings, offload=offload)
        return _build(sides, batches, chosen, layers=layers, progress=progress)

    wanted = settings.offload
    lockstep = build("device" if wanted == "auto" else wanted)
    try:
        if not fits(lockstep.memory, need.extra):
            settle()
        if wanted == "auto":
            nearest = nearest_offload(lockstep.memory, need.extra)
            if nearest != lockstep.offload:
                lockstep.close()
                lockstep = build(nearest)
        _check_memory(lockstep, need)
    except BaseException:
        lockstep.close()
        raise
    count, memory = len(sides), lockstep.lead.memory.describe()
    logger.debug("%d model(s) in step, offload %s: %s", count, lockstep.offload, memory)
    return lockstep


def _build(
    sides: Mapping[str, Side],
    batches: Sequence[Batch],
    settings: StreamSettings,
    *,
    layers: Collection[int],
    progress: Progress,
) -> Lockstep:
    opened: dict[str, tuple[OpenModel, RouterStream]] = {}
    stopwatch = Stopwatch(settings.device)
    try:
        for name, side in sides.items():
            stream = RouterStream(
                side.model.checkpoint,
                [batch for batch in batches if side.domain in (None, batch.domain)],
                settings,
                layers=layers,
                output="logits",
                on_output=side.on_output,
                progress=None if opened else progress,
                stopwatch=stopwatch,
            )
            opened[name] = (side.model, stream)
    except BaseException:
        for _, stream in opened.values():
            stream.close()
        raise
    lead = opened.pop(next(iter(opened)))
    return Lockstep(lead, opened)


def _check_memory(lockstep: Lockstep, need: Need) -> None:
    """Refuse what does not fit, and say what to change."""
    if fits(lockstep.memory, need.extra):
        disk = sum(estimate.on_disk for estimate in lockstep.memory)
        if disk:
            require_space(Path(tempfile.gettempdir()), disk)
        return
    device, host = needed(lockstep.memory, need.extra)
    where = lockstep.lead.device
    usable = int(available_memory(where) * HEADROOM)
    others = f" and {len(lockstep.others)} others with it" if lockstep.others else ""
    hints = [] if lockstep.offload == "disk" else ['`offload="disk"` parks activations there']
    raise ResourceError(
        f"{need.job} needs about {format_size(device)} on {where} and {format_size(host)} of host "
        f"memory; {format_size(usable)} are usable on {where}. {lockstep.lead.memory.describe()}"
        f"{others}; {format_size(need.extra)} for what is done with the features",
        hint="; ".join([*hints, *need.hints]),
    )
