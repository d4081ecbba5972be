"""Devices, memory and disk space. Only `runtime` and `kernels` use torch.cuda."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moemerge.errors import UsageError
from moemerge.runtime import ranks
from moemerge.runtime.lazy import torch


def check_device(name: str) -> None:
    """Refuse a device that does not exist; imports torch only for a GPU."""
    if name not in ("auto", "cpu"):
        resolve_device(name)


def resolve_device(name: str) -> torch.device:
    """Return a device; `auto` is a GPU if there is one. Any other must exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r}", hint="use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name!r} was asked for, but no CUDA device is available here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {name!r} was asked for, but the last CUDA device here is "
            f"cuda:{torch.cuda.device_count() - 1}"
        )
    if device.type not in {"cpu", "cuda"}:
        raise UsageError(f"device {name!r} is not supported", hint="use auto, cpu, cuda or cuda:N")
    return device


def prepare_for_threads(device: torch.device) -> None:
    """Load libraries that torch loads at first use and cannot load from two threads at once.

    The CUDA library of torch.linalg is one: its first call must not come from workers.
    """
    if device.type == "cuda":
        torch.linalg.eigh(torch.eye(2, device=device))


class OwnStream(threading.local):
    """A CUDA stream per thread, so that small kernels of several threads run in parallel.

    No effect on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream
        self._stream = make(device) if device.type == "cuda" else None

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Use this thread's stream inside the block; tensors must not pass between threads."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)


@contextlib.contextmanager
def attention_without_plans() -> Iterator[None]:
    """Disable cuDNN attention inside the block: it makes a plan in every thread (60 ms)."""
    was: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def release_cached(device: torch.device) -> None:
    """Return GPU memory that torch has reserved but does not use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use algorithms on a GPU inside the block that give the same bits in every run.

    Those without such an algorithm run unchanged: scattered additions to distinct places, whose
    order does not matter.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch warns without it
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        memory.fill_uninitialized_memory = filled


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device is a GPU with bf16 products: Ampere (8.0) and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def gpu_names() -> list[str]:
    """Return the names of this machine's GPUs."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def gpu_memory(device: torch.device) -> int:
    """Return the total memory of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def available_memory(device: torch.device) -> int:
    """Return the bytes that this process may allocate now.

    That is its share of the free GPU memory, or of Linux's available memory. Ranks start together
    and share the free memory. Workers start at any time: each may use its share of all memory, if
    that is free.
    """
    free = _free_memory(device) // ranks.sharing(device)
    workers = _workers.get(device.type, 1)
    if workers == 1:
        return free
    return min(free, (gpu_memory(device) if device.type == "cuda" else host_memory()) // workers)


_workers: dict[str, int] = {}  # processes that share the memory of each type of device


def share_memory(**workers: int) -> None:
    """Set the number of worker processes that share each type of device."""
    _workers.update(workers)


def host_memory() -> int:
    """Return the bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        # Memory in torch's cache is used for the driver, but free for torch.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    if os.path.exists("/proc/meminfo"):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return host_memory()


def free_disk(folder: Path) -> int:
    """Return the free bytes on the disk of `folder`, which may not exist yet."""
    folder = folder.absolute()
    while not os.path.exists(folder):
        folder = folder.parent
    return shutil.disk_usage(folder).free


def cpu_count() -> int:
    """Return the cores for this process: its share if several run one job."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // ranks.neighbours())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was exhausted. CUDA libraries report it as a RuntimeError of theirs."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("ALLOC_FAILED" in text or "allocate memory" in text)
