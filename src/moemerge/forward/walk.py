"""Several models on the same batches, layer by layer, within the memory of the machine.

with open_walk(members, batches, settings, job="calibration") as walk:
    for number in walk:                       # every model stands before this layer
        for stops in walk.routers():          # every model waits at its next router
            stops[MERGED].inputs("math")
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from torch import Tensor

from moemerge.checkpoint import Checkpoint, format_size, require_space
from moemerge.errors import ArchitectureError, ResourceError
from moemerge.forward.settings import (
    HEADROOM,
    NEAREST_FIRST,
    MemoryEstimate,
    StreamSettings,
    fits,
    needed,
)
from moemerge.forward.spill import Offload
from moemerge.forward.stops import ModuleStop
from moemerge.forward.stream import ModelStream, Output
from moemerge.runtime.devices import available_memory
from moemerge.runtime.progress import Progress, counted
from moemerge.runtime.timing import Stopwatch
from moemerge.text.batches import Batch

logger = logging.getLogger(__name__)

# Memory of Python, torch and transformers, of thread heaps and cached oneDNN kernels (measured).
PROCESS_BYTES: Final = 512 * 2**20


@dataclass(frozen=True)
class Member:
    """A model of a walk: on which domains it runs, and what happens to its output."""

    checkpoint: Checkpoint
    domains: Collection[str] | None = None  # None: all
    output: Output = "hidden"
    on_output: Callable[[Batch, Tensor], None] | None = None
    layer_inputs: bool = False  # whether `stream.entered` has the hidden states before each layer


class Walk:
    """Iterate to bring every model to its next layer. The first model leads."""

    def __init__(self, streams: Mapping[str, ModelStream], extra: int = 0) -> None:
        self.streams = streams
        self.lead = next(iter(streams.values()))
        self.extra = extra  # bytes that the job needs besides the streams

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()

    def __iter__(self) -> Iterator[int]:
        while True:
            numbers = {name: stream.begin_layer() for name, stream in self.streams.items()}
            number = self.lead.layer
            if set(numbers.values()) != {number}:
                raise self._apart({name: f"layer {at}" for name, at in numbers.items()})
            if number is None:
                return
            yield number

    def routers(self) -> Iterator[dict[str, ModuleStop]]:
        """Run all models to each router of the layer in turn."""
        routers = {name: stream.routers() for name, stream in self.streams.items()}
        while True:
            stops = {name: next(own, None) for name, own in routers.items()}
            there = {name: stop for name, stop in stops.items() if stop is not None}
            if not there:
                return
            if len(there) != len(stops):
                raise self._apart({n: "the end" if s is None else s.path for n, s in stops.items()})
            yield there

    def _apart(self, places: Mapping[str, str]) -> ArchitectureError:
        labels = {name: stream.checkpoint.label for name, stream in self.streams.items()}
        where = ", ".join(f"{labels[name]} is at {place}" for name, place in places.items())
        return ArchitectureError(
            f"the models do not run the same layers: {where}",
            hint="the models' config.json must describe the same structure",
        )

    @property
    def memory(self) -> list[MemoryEstimate]:
        """The memory estimate of each model, the leading one first."""
        return [stream.memory for stream in self.streams.values()]

    @property
    def process_bytes(self) -> int:
        """Return the peak memory that this process is expected to use on its device."""
        own = PROCESS_BYTES if self.lead.device.type == "cpu" else 0
        return own + needed(self.memory, self.extra)[0]

    def start_note(self, job: str) -> str:
        """State what a job is about to read, and the memory that it needs."""
        read = sum(stream.stored_bytes for stream in self.streams.values())
        return (
            f"{job} reads {format_size(read)} of {counted(len(self.streams), 'model')}, and needs "
            f"about {format_size(self.process_bytes)} on {self.lead.device}"
        )


def open_walk(
    members: Mapping[str, Member],
    batches: Sequence[Batch],
    settings: StreamSettings,
    *,
    job: str,
    last_layer: int | None = None,
    extra: Callable[[Walk], int] = lambda walk: 0,
    hints: Sequence[str] = (),
    progress: Progress | None = None,
    stopwatch: Stopwatch | None = None,
) -> Walk:
    """Open models with their activations offloaded to the nearest place that is large enough.

    If there is none, they do not read the next layer before the current one is released. Refuses
    what fits nowhere: `job` and `hints` are for that message, `extra` returns the bytes on the
    device that the job needs besides.
    """
    kinds: Sequence[Offload] = NEAREST_FIRST
    if settings.offload != "auto":
        kinds = (settings.offload,)
    elif settings.device.type == "cpu":
        kinds = [kind for kind in NEAREST_FIRST if kind != "cpu"]
    choices = [replace(settings, offload=kind) for kind in kinds]
    if settings.prefetches:
        choices += [replace(choice, prefetch=False) for choice in choices]
    stopwatch = stopwatch or Stopwatch(settings.device)
    for choice in choices:
        streams: dict[str, ModelStream] = {}
        with ExitStack() as undo:  # close opened streams if a later one fails
            for name, member in members.items():
                domains = member.domains
                streams[name] = ModelStream(
                    member.checkpoint,
                    [batch for batch in batches if domains is None or batch.domain in domains],
                    choice,
                    output=member.output,
                    on_output=member.on_output,
                    last_layer=last_layer,
                    layer_inputs=member.layer_inputs,
                    progress=None if streams else progress,
                    stopwatch=stopwatch,
                )
                undo.callback(streams[name].close)
            walk = Walk(streams)
            walk.extra = extra(walk)
            if fits(walk.memory, walk.extra):
                disk = sum(estimate.on_disk for estimate in walk.memory)
                if disk:
                    require_space(Path(tempfile.gettempdir()), disk)
                undo.pop_all()
                logger.debug("%d model(s) in step: %s", len(streams), walk.memory[0].describe())
                return walk
            error = _shortage(walk, job, hints)
    raise error


def _shortage(walk: Walk, job: str, hints: Sequence[str]) -> ResourceError:
    """Return the error for models that do not fit, with advice."""
    lead = walk.memory[0]
    device, host = needed(walk.memory, walk.extra)
    usable = int(available_memory(lead.device) * HEADROOM)
    others = f" and {len(walk.memory) - 1} others with it" if len(walk.memory) > 1 else ""
    advice = [] if lead.offload == "disk" else ['`offload="disk"` offloads activations to disk']
    return ResourceError(
        f"{job} needs about {format_size(device)} on {lead.device} and {format_size(host)} of "
        f"host memory; {format_size(usable)} are usable on {lead.device}. {lead.describe()}"
        f"{others}; {format_size(walk.extra)} for the work on the features",
        hint="; ".join([*advice, *hints]),
    )
