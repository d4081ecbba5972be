"""CUDA streams and graphs: overlapped copies, recorded steps."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Large enough for copies at the bus's full speed, small enough that a few pin little memory.
BUFFER_BYTES = 16 * 2**20


class Uploads:
    """Copies to the device that overlap with its computation. Thread-safe.

    The computing thread allocates the targets and calls `begin`. Any thread may fill a `buffer` and
    `send` it. The computing thread calls `finish` before it uses the targets.
    """

    def __init__(self, device: torch.device, buffers: int) -> None:
        self.device = device
        make: Any = torch.cuda.Stream
        self._stream = make(device)
        # Buffers that are free, or will be after their event; None: not yet allocated.
        self._free: queue.SimpleQueue[tuple[Tensor | None, Any]] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put((None, None))

    def begin(self) -> None:
        """Make copies wait for the work queued so far, which may still use a target's memory."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def finish(self) -> None:
        """Make work queued from now on wait for all copies that were sent."""
        torch.cuda.current_stream(self.device).wait_stream(self._stream)

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Pinned]:
        """Lend a pinned buffer to fill and send; it is free again when its copy is done."""
        memory, event = self._free.get()
        lent = Pinned(self, memory, event)
        try:
            yield lent
        finally:
            self._free.put((lent.memory, lent.event))

    def queued(self) -> contextlib.AbstractContextManager[Any]:
        """Queue the kernels launched in this block between the copies."""
        return torch.cuda.stream(self._stream)

    def copy(self, host: Tensor, target: Tensor) -> Any:
        """Queue a copy from pinned memory and return the event of its end."""
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
        """Return pinned memory of the target's shape and dtype, free to be written."""
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


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor in pinned host memory, for a copy at the bus's full speed.

    torch reuses freed pinned memory, so a second copy of the same size allocates nothing.
    """
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def uploads_to(device: torch.device, buffers: int) -> Uploads | None:
    """Return `Uploads` for a GPU. A CPU needs none: tensors are read into place."""
    return Uploads(device, buffers) if device.type == "cuda" else None


# Ordinary steps before the recording, so that libraries have made their first allocations.
WARM_UP = 3


class RecordedStep:
    """Calls `step`; on a GPU, records it as a CUDA graph and replays it.

    The step must do the same work on the same tensors each time, and read no value back. A small
    model's step is hundreds of small kernels, which run in less time than their launches take.
    """

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._device.type != "cuda":
            self._step()
            return
        if self._graph is not None:
            self._graph.replay()
            return
        if self._done < WARM_UP:
            self._warm_up()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self._device), torch.cuda.graph(graph):
                self._step()
            graph.replay()  # recording does not run it
            self._graph = graph
        self._done += 1

    def _warm_up(self) -> None:
        """Run the step on its own stream, as a recording requires of earlier steps."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)

    def wait(self) -> None:
        """Wait until all steps so far are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
