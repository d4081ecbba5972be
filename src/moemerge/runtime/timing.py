"""Where the time of a run goes. A device keeps its own times and is waited for once, at the end."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

# A point in time: of the host (seconds), or an event in a device's queue.
Mark = Any


@dataclass
class Stopwatch:
    """Seconds by name, one after the other on the time line of `device`.

    A span of a GPU runs from the end of what was queued before it to the end of what was queued in
    it, so its sum over all spans is the run's time. What goes on beside it (reading, copying) is
    counted apart, in `beside`, with the bytes it moved.
    """

    device: torch.device
    beside: dict[str, float] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _pending: list[tuple[str, Any, Any]] = field(default_factory=list)
    _beside_lock: threading.Lock = field(default_factory=threading.Lock)

    def mark(self) -> Mark:
        """Now, on the device's time line."""
        if self.device.type != "cuda":
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, name: str, begin: Mark, end: Mark | None = None) -> None:
        """Count the time between two marks (the second: now) under a name."""
        end = self.mark() if end is None else end
        if isinstance(begin, float):
            self._count(name, end - begin)
        else:
            self._pending.append((name, begin, end))

    def count(self, name: str, seconds: float) -> None:
        """Count seconds that were taken on the host while the device had nothing to do."""
        self._count(name, seconds)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self.mark()
        yield
        self.add(name, begin)

    def aside(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Count what was done beside the time line. Safe from any thread: several models may read
        at once."""
        with self._beside_lock:
            self.beside[name] = self.beside.get(name, 0.0) + seconds
            self.nbytes[name] = self.nbytes.get(name, 0) + nbytes

    def totals(self) -> dict[str, float]:
        """Seconds by name; waits for the device."""
        if self._pending:
            torch.cuda.synchronize(self.device)
            for name, begin, end in self._pending:
                self._count(name, begin.elapsed_time(end) / 1e3)
            self._pending.clear()
        return dict(self._seconds)

    def _count(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that torch has taken from a GPU so far, spare ones included; None: a CPU."""
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None


def memory_in_use(device: torch.device) -> tuple[int, int] | None:
    """Bytes of a GPU's that tensors hold now, and the most that they held; None: a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


@dataclass(frozen=True)
class Timings:
    """Where a run's seconds went: one after the other, and in the background."""

    seconds: Mapping[str, float]  # by part, up to the last router or map, and "write"
    solved: float  # from the start until the last of them was solved for
    beside: Mapping[str, tuple[float, int]]  # seconds and bytes of what ran in the background
    peak_memory: int | None  # bytes on a GPU

    @classmethod
    def of(cls, stopwatch: Stopwatch, solved: float, peak: int | None) -> Timings:
        parts = stopwatch.totals()
        parts["other"] = max(0.0, solved - math.fsum(parts.values()))
        beside = {name: (s, stopwatch.nbytes[name]) for name, s in stopwatch.beside.items()}
        return cls(parts, solved, beside, peak)

    def written(self, seconds: float, copied: tuple[float, int]) -> Timings:
        """The same once the output is there."""
        return replace(
            self,
            seconds={**self.seconds, "write": seconds},
            beside={**self.beside, "copy": copied},
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "solved": round(self.solved, 3),
            "seconds": {name: round(s, 3) for name, s in self.seconds.items()},
            "beside": {
                name: {"seconds": round(s, 3), "bytes": nbytes}
                for name, (s, nbytes) in self.beside.items()
            },
            "peak_gpu_memory": self.peak_memory,
        }
