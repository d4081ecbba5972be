"""Timings of a run. Device times are recorded as events and read once, at the end."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

# A point in time: seconds on the host, or an event in a device's queue.
Mark = Any


@dataclass
class Stopwatch:
    """Seconds by name, in consecutive spans on the timeline of `device`.

    On a GPU a span lasts from the end of the work queued before it to the end of the work queued in
    it, so all spans together are the run's time. Overlapping work (reading, copying) is counted in
    `beside`, with its bytes.
    """

    device: torch.device
    beside: dict[str, tuple[float, int]] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _pending: list[tuple[str, Any, Any]] = field(default_factory=list)
    _beside_lock: threading.Lock = field(default_factory=threading.Lock)

    def mark(self) -> Mark:
        """Return the current time on the device's timeline."""
        if self.device.type != "cuda":
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def add(self, name: str, begin: Mark, end: Mark | None = None) -> None:
        """Add the time between two marks to a name; the second is now by default."""
        end = self.mark() if end is None else end
        if isinstance(begin, float):
            self.count(name, end - begin)
        else:
            self._pending.append((name, begin, end))

    def count(self, name: str, seconds: float) -> None:
        """Add seconds of the host, during which the device was idle."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self.mark()
        yield
        self.add(name, begin)

    def aside(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Add the time and bytes of overlapping work. Thread-safe: several models may read."""
        with self._beside_lock:
            before = self.beside.get(name, (0.0, 0))
            self.beside[name] = (before[0] + seconds, before[1] + nbytes)

    def totals(self) -> dict[str, float]:
        """Return seconds by name; synchronises with the device."""
        if self._pending:
            torch.cuda.synchronize(self.device)
            for name, begin, end in self._pending:
                self.count(name, begin.elapsed_time(end) / 1e3)
            self._pending.clear()
        return dict(self._seconds)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak of torch's reserved GPU memory; None for a CPU."""
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None


@dataclass(frozen=True)
class Timings:
    """Seconds of a run's consecutive parts, and of work in the background."""

    seconds: Mapping[str, float]  # by part, up to the last router or map, and "write"
    solved: float  # from the start until the last of them was solved
    beside: Mapping[str, tuple[float, int]]  # seconds and bytes of work in the background
    peak_memory: int | None  # bytes on a GPU

    @classmethod
    def of(cls, stopwatch: Stopwatch, solved: float, peak: int | None) -> Timings:
        parts = stopwatch.totals()
        parts["other"] = max(0.0, solved - math.fsum(parts.values()))
        return cls(parts, solved, dict(stopwatch.beside), peak)

    def written(self, seconds: float, copied: tuple[float, int]) -> Timings:
        """Return the timings with those of writing the output."""
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
