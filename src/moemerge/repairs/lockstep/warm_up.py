"""Compile GPU kernels and load libraries for the first solve while text is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from moemerge.families.opened import OpenModel
from moemerge.families.rules import Gate
from moemerge.routing import DomainFeatures, RouterProblem
from moemerge.runtime.devices import gpu_memory, is_out_of_memory, prepare_for_threads

DOMAINS = ("one", "two")
# Large enough to use the same kernels as later, small enough to be quick.
VALUES, TOKENS = 2**28, 2**17
MEMORY_PER_VALUE = 256  # bytes of GPU memory; the rehearsal uses a twentieth at most
NEEDS_NONE = ("cpu",)


class WarmUp:
    """Runs a rehearsal in a background thread. CPUs need none."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, device: torch.device, work: Callable[[], object]) -> None:
        if device.type not in NEEDS_NONE:
            self._thread = threading.Thread(
                target=self._run, args=(device, work), name="moemerge-warm-up", daemon=True
            )
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """Wait before the first solve: two threads must not load the same libraries. Safe to
        repeat."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, device: torch.device, work: Callable[[], object]) -> None:
        try:
            prepare_for_threads(device)
            work()
        except BaseException as error:
            # A rehearsal only saves time, and the run checks its memory itself. Other errors are
            # raised again in the waiting thread.
            self._error = None if is_out_of_memory(error) else error


def router_like(model: OpenModel, device: torch.device, dtype: torch.dtype) -> RouterProblem | None:
    """Return a random problem with the kernels of the model's routers, or None without a gate."""
    place = next((p for p in model.architecture.routers() if p.gate is not None), None)
    if place is None or place.gate is None:
        return None  # refused later, with a reason
    shape = (place.rows, model.checkpoint.tensors[place.weight].shape[1])
    return random_router(place.gate, shape, bias=place.bias is not None, dtype=dtype, device=device)


def random_router(
    gate: Gate,
    shape: tuple[int, int],
    *,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> RouterProblem:
    """Return a router of this shape, and two domains of random features with source routers."""
    experts, width = shape
    generator = torch.Generator(device).manual_seed(0)
    values = VALUES
    if device.type == "cuda":
        values = min(values, gpu_memory(device) // MEMORY_PER_VALUE)
    tokens = min(TOKENS, values // width)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, generator=generator)

    merged = (normal(experts, width + bias) * width**-0.5).double()
    domains = [
        DomainFeatures(
            name,
            [normal(tokens, width).to(dtype)],
            merged + 0.1 * width**-0.5 * normal(experts, width + bias),
        )
        for name in DOMAINS
    ]
    selection = None if gate.selection_bias is None else merged.new_zeros(experts)
    return RouterProblem(
        gate=gate,
        merged=merged,
        domains=domains,
        holdout=[],
        dtypes=(dtype, dtype if bias else None),
        selection_bias=selection,
        source_biases=dict.fromkeys(DOMAINS, selection),
    )
