"""A step that is done many times: on a GPU it is recorded once and then replayed.

A small model's step is hundreds of small kernels; starting them one by one takes longer than they
run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Steps done in the ordinary way before the recording, so that libraries have allocated what they
# allocate at first use.
WARM_UP = 3


class Repeated:
    """Calls `step`, which must do the same work on the same tensors each time, and reads no value
    back from the device."""

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
