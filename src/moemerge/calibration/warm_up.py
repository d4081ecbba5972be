"""What a GPU's first solve waits for: kernels compiled and libraries loaded while text is read."""

from __future__ import annotations

import threading
from typing import Self

import torch

from moemerge.architectures.gates import Gate
from moemerge.architectures.opened import OpenModel
from moemerge.calibration.layer import LayerProblem, calibrate_layer
from moemerge.routing import DomainFeatures, SolveSettings
from moemerge.runtime.devices import gpu_memory, prepare_for_threads
from moemerge.runtime.process import start_thread

DOMAINS = ("one", "two")
# Long enough that the same kernels serve as later, short enough to be no work.
VALUES, TOKENS = 2**28, 2**17
MEMORY_PER_VALUE = 256  # bytes of a GPU's: a twentieth of it at the most
NEEDS_NONE = ("cpu",)


class WarmUp:
    """Solves for a random router of a model's shape in a thread of its own. CPUs need none."""

    def __init__(self, settings: SolveSettings) -> None:
        self._settings = settings
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, model: OpenModel, device: torch.device, dtype: torch.dtype) -> None:
        if device.type not in NEEDS_NONE:
            self._thread = threading.Thread(
                target=self._run, args=(model, device, dtype), name="moemerge-warm-up", daemon=True
            )
            start_thread(self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """Before the first solve: two threads must not load the same libraries. Safe twice."""
        self._join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, model: OpenModel, device: torch.device, dtype: torch.dtype) -> None:
        try:
            self._solve(model, device, dtype)
        except torch.OutOfMemoryError:
            pass  # it only saves time: whether the run itself has room is for the run to tell
        except BaseException as error:  # raised in the thread that waits
            self._error = error

    def _solve(self, model: OpenModel, device: torch.device, dtype: torch.dtype) -> None:
        place = next((p for p in model.architecture.routers() if p.gate is not None), None)
        if place is None or place.gate is None:
            return  # refused elsewhere, with a reason
        prepare_for_threads(device)
        problem = random_problem(
            place.gate,
            (place.rows, model.checkpoint.tensors[place.weight].shape[1]),
            bias=place.bias is not None,
            dtype=dtype,
            device=device,
        )
        calibrate_layer(problem, self._settings, start=problem.merged)


def random_problem(
    gate: Gate,
    shape: tuple[int, int],
    *,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerProblem:
    """Two domains of random features, and routers beside each other."""
    experts, width = shape
    generator = torch.Generator(device).manual_seed(0)
    values = VALUES
    if device.type == "cuda":
        values = min(values, gpu_memory(device) // MEMORY_PER_VALUE)
    tokens = min(TOKENS, values // width)

    def normal(rows: int, columns: int) -> torch.Tensor:
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
    selection = None
    if gate.selection_bias is not None:
        selection = torch.zeros(experts, dtype=torch.float64, device=device)
    return LayerProblem(
        gate=gate,
        merged=merged,
        domains=domains,
        holdout=[],
        dtypes=(dtype, dtype if bias else None),
        selection_bias=selection,
        source_biases=dict.fromkeys(DOMAINS, selection),
    )
