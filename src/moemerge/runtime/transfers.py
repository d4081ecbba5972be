"""From the host to a GPU beside its computing: a stream of its own and a few pinned buffers."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Long enough that a copy runs at the bus's speed, short enough that a handful pins little memory.
BUFFER_BYTES = 16 * 2**20


class Uploads:
    """Copies that run while the device computes. Safe from several threads.

    Targets are allocated by the thread that computes, which then calls `begin`; any thread may
    fill a `buffer` and `send` it; the computing thread calls `finish` before it uses the targets.
    """

    def __init__(self, device: torch.device, buffers: int) -> None:
        self.device = device
        make: Any = torch.cuda.Stream
        self._stream = make(device)
        # Buffers that are free, or will be once their event has happened; None: not yet allocated.
        self._free: queue.SimpleQueue[tuple[Tensor | None, Any]] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put((None, None))

    def begin(self) -> None:
        """Copies wait for what is queued now: a target's memory may still be in use by it."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        """What is queued from here on waits for every copy that was sent."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Pinned]:
        """A pinned buffer to fill and send; it comes back when its copy is done."""
        memory, event = self._free.get()
        lent = Pinned(self, memory, event)
        try:
            yield lent
        finally:
            self._free.put((lent.memory, lent.event))

    def copy(self, host: Tensor, target: Tensor) -> Any:
        """Queue a copy from pinned memory; the event tells when it has been done."""
        with torch.cuda.stream(self._stream):
            target.copy_(host, non_blocking=True)
            make: Any = torch.cuda.Event
            event = make()
            event.record(self._stream)
        return event


class Pinned:
    """One pinned buffer, lent to one thread."""

    def __init__(self, uploads: Uploads, memory: Tensor | None, event: Any) -> None:
        self.memory = memory
        self.event = event
        self._uploads = uploads

    def like(self, target: Tensor) -> Tensor:
        """Pinned memory of the target's shape and dtype, free to be written."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None
        nbytes = target.numel() * target.element_size()
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = None
            size = max(nbytes, BUFFER_BYTES)
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self.memory[:nbytes].view(target.dtype).view(target.shape)

    def send(self, host: Tensor, target: Tensor) -> None:
        self.event = self._uploads.copy(host, target)


def uploads_to(device: torch.device, buffers: int) -> Uploads | None:
    """None for a CPU, where a tensor is read to where it stays."""
    return Uploads(device, buffers) if device.type == "cuda" else None
