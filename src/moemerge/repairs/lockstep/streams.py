"""Several models in step on the same tokens: opened within memory, and stopped at every router.

    with open_output(...) as output, open_lockstep(sides, batches, settings, ...) as lockstep:
        output.begin(key, names, replace=replace)   # a journal, and OUT under a temporary name
        walk(lockstep, routers, visitor, output, ranks)
        output.finish(files)

A visitor gets a router with its counterparts in the sources when all models have stopped at it. It
returns the tensors to store and a row of the report. The leading model continues with these
tensors, so later routers see the features of the repaired model. A job with other stops (any
module, whole layers) uses `open_streams` and its own loop over `features.stream.ModelStream`, with
the same `Output`.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self, TypeVar

from torch import Tensor

from moemerge.checkpoint import format_size, require_space
from moemerge.errors import ArchitectureError, ResourceError
from moemerge.families.opened import OpenModel
from moemerge.forward.old_stream import ModelStream
from moemerge.forward.router_stream import RouterStop, RouterStream
from moemerge.forward.settings import (
    HEADROOM,
    NEAREST_FIRST,
    MemoryEstimate,
    StreamSettings,
    fits,
    needed,
)
from moemerge.forward.spill import Offload
from moemerge.repairs.lockstep.journal import Entry
from moemerge.repairs.lockstep.models import PairedRouter
from moemerge.repairs.lockstep.output import Output
from moemerge.runtime.devices import available_memory
from moemerge.runtime.progress import Progress, counted
from moemerge.runtime.ranks import Ranks
from moemerge.runtime.timing import Stopwatch
from moemerge.text.batches import Batch

logger = logging.getLogger(__name__)

# Memory of Python, torch and transformers, of thread heaps and cached oneDNN kernels (measured).
PROCESS_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Side:
    """One model that is run, on all text or on some domains only."""

    model: OpenModel
    domains: tuple[str, ...] | None = None

    @property
    def on_output(self) -> Callable[[Batch, Tensor], None] | None:
        """A function that receives the logits of each batch, or None."""
        return None


@dataclass(frozen=True)
class Stops:
    """One stop: all models are paused at the same router."""

    lead: RouterStop
    others: Mapping[str, RouterStop]


class Lockstep:
    """Iterate to get the stops of all models, router by router.

    Other models than the leading one may process fewer batches: those of their own domain.
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
        """All streams, the leading one first."""
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
        for name, (model, stops) in others.items():  # run to the end, which emits logits
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
        """The memory estimate of each model."""
        return [stream.memory for stream in self.streams]


@dataclass(frozen=True)
class Need:
    """Bytes that a job needs besides its streams, and advice if they do not fit."""

    job: str  # "calibration"
    extra: int  # on the device
    hints: Sequence[str]  # what would make it fit, the mildest first
    on_host: int = 0  # of a GPU


class Streams(Protocol):
    """Models that are streamed in step."""

    @property
    def memory(self) -> Sequence[MemoryEstimate]:
        """The estimate of each model, the leading one first."""

    def close(self) -> None: ...


M = TypeVar("M", bound=Streams)


def open_streams(
    build: Callable[[StreamSettings], M],
    need: Callable[[M], Need],
    settings: StreamSettings,
    settle: Callable[[], None] = lambda: None,
) -> M:
    """Build streams with their activations offloaded to the nearest place that is large enough.

    If there is none, streams do not read the next layer before the current one is released.
    Refuses what fits nowhere. `settle` waits for work that holds memory for a while; it is called
    if the streams do not fit at once.
    """
    kinds: Sequence[Offload] = NEAREST_FIRST
    if settings.offload != "auto":
        kinds = (settings.offload,)
    elif settings.device.type == "cpu":
        kinds = [kind for kind in NEAREST_FIRST if kind != "cpu"]
    choices = [replace(settings, offload=kind) for kind in kinds]
    if settings.prefetches:
        choices += [replace(choice, prefetch=False) for choice in choices]
    for choice in choices:
        streams = build(choice)
        try:
            needs = need(streams)
            if not fits(streams.memory, needs.extra, on_host=needs.on_host):
                settle()
            if fits(streams.memory, needs.extra, on_host=needs.on_host):
                disk = sum(estimate.on_disk for estimate in streams.memory)
                if disk:
                    require_space(Path(tempfile.gettempdir()), disk)
                described = streams.memory[0].describe()
                logger.debug("%d model(s) in step: %s", len(streams.memory), described)
                return streams
            error = _shortage(streams.memory, needs)
        except BaseException:
            streams.close()
            raise
        streams.close()
    raise error


def _shortage(memory: Sequence[MemoryEstimate], need: Need) -> ResourceError:
    """Return the error for streams that do not fit, with advice."""
    lead = memory[0]
    device, host = needed(memory, need.extra, on_host=need.on_host)
    usable = int(available_memory(lead.device) * HEADROOM)
    others = f" and {len(memory) - 1} others with it" if len(memory) > 1 else ""
    hints = [] if lead.offload == "disk" else ['`offload="disk"` offloads activations to disk']
    return ResourceError(
        f"{need.job} needs about {format_size(device)} on {lead.device} and {format_size(host)} of "
        f"host memory; {format_size(usable)} are usable on {lead.device}. {lead.describe()}"
        f"{others}; {format_size(need.extra)} for the work on the features",
        hint="; ".join([*hints, *need.hints]),
    )


def start_note(streams: Sequence[ModelStream], need: Need) -> str:
    """State what a job is about to read, and the memory that it needs."""
    read = 0
    for stream in streams:
        names = {name for recipe in stream.names.recipes.values() for _, name in recipe.sources}
        read += sum(stream.checkpoint.tensors[name].stored_bytes for name in names)
    memory = [stream.memory for stream in streams]
    device = process_bytes(memory, need.extra)
    _, host = needed(memory, need.extra, on_host=need.on_host)
    where = memory[0].device
    also = "" if where.type == "cpu" else f", {format_size(host)} of host memory"
    models = counted(len(streams), "model")
    return (
        f"{need.job} reads {format_size(read)} of {models}, and needs about "
        f"{format_size(device)} on {where}{also}"
    )


def process_bytes(memory: Sequence[MemoryEstimate], extra: int) -> int:
    """Return the peak memory that this process is expected to use on its device."""
    own = PROCESS_BYTES if memory[0].device.type == "cpu" else 0
    return own + needed(memory, extra)[0]


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
    """Open models that stop at each router together; the first side leads. See `open_streams`."""

    def build(chosen: StreamSettings) -> Lockstep:
        opened: dict[str, tuple[OpenModel, RouterStream]] = {}
        stopwatch = Stopwatch(chosen.device)
        with ExitStack() as undo:  # close opened streams if a later one fails
            for name, side in sides.items():
                stream = RouterStream(
                    side.model.checkpoint,
                    [b for b in batches if side.domains is None or b.domain in side.domains],
                    chosen,
                    layers=layers,
                    output="logits",
                    on_output=side.on_output,
                    progress=None if opened else progress,
                    stopwatch=stopwatch,
                )
                undo.callback(stream.close)
                opened[name] = (side.model, stream)
            undo.pop_all()
        lead = opened.pop(next(iter(opened)))
        return Lockstep(lead, opened)

    return open_streams(build, lambda _: need, settings, settle)


# --- walk ---------------------------------------------------------------------------------------


class Visitor:
    """The work of a job at each router."""

    def visit(self, pair: PairedRouter, stops: Stops) -> Entry | None:
        """Return the entry of a router that all models stopped at, or None if unchanged."""
        raise NotImplementedError

    def added(self, entry: Entry) -> None:
        """Note that an entry is in the journal."""

    def resumed(self, entry: Entry) -> None:
        """Note that a killed run had finished this router, which is not visited."""


def walk(
    lockstep: Lockstep,
    routers: Sequence[PairedRouter],
    visitor: Visitor,
    output: Output,
    ranks: Ranks,
) -> None:
    """Visit every router in the order in which the models run them."""
    label, left = lockstep.model.label, {pair.info.weight: pair for pair in routers}
    for stops in lockstep:
        with lockstep.stopwatch.span("journal"):
            output.check()
        name = stops.lead.weight_name
        pair = left.pop(name, None)
        if pair is None:
            raise ArchitectureError(
                f"{label}: {name} is run as a router, but the table of families knows nothing of it"
            )
        entry = output.finished(name)
        if entry is not None:
            visitor.resumed(entry)
        else:
            entry = ranks.broadcast_object(visitor.visit(pair, stops))
            if entry is not None:
                with lockstep.stopwatch.span("journal"):
                    output.add(entry)
                visitor.added(entry)
        if entry is not None:
            stops.lead.replace_stored(entry.tensors)
    output.check()
    if left:
        raise ArchitectureError(
            f"{label}: the model never ran {', '.join(sorted(left))}",
            hint="config.json and weights may not belong together",
        )
