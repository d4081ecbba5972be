"""One model and others beside it, stop by stop: at the same router, on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Self

from moemerge.architectures.opened import OpenModel
from moemerge.errors import ArchitectureError
from moemerge.features.memory import MemoryEstimate
from moemerge.features.router_stream import RouterStop, RouterStream
from moemerge.features.spill import Offload

Stops = tuple[RouterStop, Mapping[str, RouterStop]]


class Lockstep:
    """Iterate to get the leading model's stop, and every other model's at the same router.

    A model beside may run over fewer batches than the leader: its own domain's alone.
    """

    def __init__(
        self,
        lead: tuple[OpenModel, RouterStream],
        beside: Mapping[str, tuple[OpenModel, RouterStream]],
    ) -> None:
        self.model, self.lead = lead
        self.beside = beside

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def streams(self) -> list[RouterStream]:
        """All of them, the leader first."""
        return [self.lead, *(stream for _, stream in self.beside.values())]

    @property
    def memories(self) -> list[MemoryEstimate]:
        return [stream.memory for stream in self.streams]

    @property
    def offload(self) -> Offload:
        return self.lead.memory.offload

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def __iter__(self) -> Iterator[Stops]:
        others = {name: (model, iter(stream)) for name, (model, stream) in self.beside.items()}
        for stop in self.lead:
            found = {
                name: self._same_router(stop, name, model, next(stops, None))
                for name, (model, stops) in others.items()
            }
            yield stop, found
        for name, (model, stops) in others.items():  # on to their end, where output waits
            extra = next(stops, None)
            if extra is not None:
                raise ArchitectureError(
                    f"{self.model.label} is at its end, {name!r} ({model.label}) at "
                    f"{extra.weight_name}",
                    hint="the models' config.json must describe the same structure",
                )

    def _same_router(
        self, stop: RouterStop, name: str, model: OpenModel, found: RouterStop | None
    ) -> RouterStop:
        key = self.model.architecture.key(stop.weight_name)
        if found is None or model.architecture.key(found.weight_name) != key:
            there = "its end" if found is None else found.weight_name
            raise ArchitectureError(
                f"{self.model.label} is at {stop.weight_name}, {name!r} ({model.label}) at {there}",
                hint="the models' config.json must describe the same structure",
            )
        return found
