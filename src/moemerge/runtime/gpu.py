"""What only a GPU needs: copies while it computes, steps replayed, deterministic operations."""

from __future__ import annotations

import contextlib
import queue
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.deterministic
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


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in a CPU's memory: pinned, so that the copy runs at the bus's speed. Pinned memory
    that was freed is used again, so the next of the size costs nothing but the copy."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def uploads_to(device: torch.device, buffers: int) -> Uploads | None:
    """None for a CPU, where a tensor is read to where it stays."""
    return Uploads(device, buffers) if device.type == "cuda" else None


class Beside:
    """Work that runs beside what is queued after it: small kernels that would leave the device
    idle. On a CPU it runs where it is called.

    `mark` what the work reads, queue more, then do the work inside `after(mark)`; there it may wait
    for its own values. `join` before others read its results.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        make: Any = torch.cuda.Stream
        # Before what is queued meanwhile: the host waits for it.
        self._stream = make(device, priority=-1) if device.type == "cuda" else None

    @property
    def ahead(self) -> int:
        """How much other work should be queued before a piece of this is waited for."""
        return 0 if self._stream is None else 2

    def mark(self) -> Any:
        """All that is queued so far."""
        if self._stream is None:
            return None
        make: Any = torch.cuda.Event
        event = make()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Inside, operations wait for `mark` and for nothing queued later. Tensors that they read
        must live until one of their results has been read back."""
        if self._stream is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is queued from here on waits for all of the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


# Steps done in the ordinary way before the recording, so that libraries have allocated what they
# allocate at first use.
WARM_UP = 3


class Repeated:
    """Calls `step`, which must do the same work on the same tensors each time, and reads no value
    back from the device. On a GPU it is recorded once and then replayed: a small model's step is
    hundreds of small kernels, and starting them one by one takes longer than they run."""

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
            self._aside()
        else:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(self._device), torch.cuda.graph(graph):
                self._step()
            graph.replay()  # recording does not run it
            self._graph = graph
        self._done += 1

    def _aside(self) -> None:
        """On a stream of its own, as recording demands of what came before it."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()
            torch.cuda.current_stream().wait_stream(stream)

    def wait(self) -> None:
        """Until all steps so far are done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Inside, operations take their deterministic form where they have one."""
    if device.type != "cuda":
        yield
        return
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # it finds faults, and takes a write of everything
    try:
        with warnings.catch_warnings():
            # cuBLAS may differ between streams; one is used here. The message says otherwise.
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
