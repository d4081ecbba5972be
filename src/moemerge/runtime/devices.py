"""Devices and free space: the only room (with the kernels) that asks torch.cuda."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moemerge.errors import UsageError
from moemerge.runtime import ranks
from moemerge.runtime.lazy import torch


def check_device(name: str) -> None:
    """Refuse a device that is not here; torch is asked only where a GPU is meant."""
    if name not in ("auto", "cpu"):
        resolve_device(name)


def resolve_device(name: str) -> torch.device:
    """`auto` takes a GPU when there is one; anything else must exist."""
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
    """Load what torch loads at first use and cannot load from two threads at once.

    The CUDA side of torch.linalg is such a library: its first call must not come from workers.
    """
    if device.type == "cuda":
        torch.linalg.eigh(torch.eye(2, device=device))


class OwnStream(threading.local):
    """Each thread's own queue of work on a GPU: there, the threads' small kernels run side by side
    instead of one after the other. On a CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        make: Any = torch.cuda.Stream
        self._stream = make(device) if device.type == "cuda" else None

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Inside, this thread's operations go there; tensors must not pass between threads."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)


@contextlib.contextmanager
def attention_without_plans() -> Iterator[None]:
    """Inside, attention on a GPU leaves cuDNN out, which plans anew in every thread (60 ms)."""
    was: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether it is a GPU whose own products are bf16's: Ampere (8.0) and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def gpu_names() -> list[str]:
    """The GPUs of this machine, by name."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def gpu_ids() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return tuple(name.strip() for name in names[:count])


def gpu_memory(device: torch.device) -> int:
    """All bytes of a GPU, whoever uses them."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def available_memory(device: torch.device) -> int:
    """Bytes that this process may allocate now: its share of the free GPU memory, or of what Linux
    calls available. Ranks begin together; workers find some of it taken by the others already, and
    may count on their share of all memory as long as so much is free."""
    free = _free_memory(device) // ranks.sharing(device)
    workers = _workers.get(device.type, 1)
    return free if workers == 1 else min(free, _all_memory(device) // workers)


_workers: dict[str, int] = {}  # that share the memory of each kind of device, this one among them


def share_memory(**workers: int) -> None:
    """From now on, count on a share: so many processes do work of their own on the same device."""
    _workers.update(workers)


def _all_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return gpu_memory(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        # What torch keeps of freed memory counts as used for the driver, but not for torch.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + kept)
    for line in _meminfo():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _all_memory(device)


def _meminfo() -> list[str]:
    path = Path("/proc/meminfo")
    return path.read_text().splitlines() if path.exists() else []


def free_disk(folder: Path) -> int:
    """Free bytes on the disk that will hold `folder`, which need not exist yet."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def cpu_count() -> int:
    """Cores this process may use: its share where several do one job."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // ranks.neighbours())
