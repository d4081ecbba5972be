"""Settings of this process: memory allocation."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# glibc keeps freed buffers up to this size. A buffer that was returned to the system comes back as
# zeroed pages, one fault at a time, which costs more than merging its contents.
REUSED_BYTES = 256 * 2**20
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter: before 2.9


def configure_process() -> None:
    """Let GPU segments grow: memory freed between others can then serve larger tensors.

    The command line calls it before it imports torch. A library must not: the process is the
    caller's.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def _glibc(function: str, *arguments: int) -> None:
    """Call glibc if this process uses it."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library
            getattr(ctypes.CDLL(None), function)(*arguments)


def reuse_freed_memory() -> None:
    """Make glibc keep freed buffers, for the rest of the process; no effect elsewhere."""
    _glibc("mallopt", _M_MMAP_THRESHOLD, REUSED_BYTES)
    _glibc("mallopt", _M_TRIM_THRESHOLD, 2 * REUSED_BYTES)


def give_back_freed_memory() -> None:
    """Make glibc return the freed buffers that it keeps; no effect elsewhere."""
    _glibc("malloc_trim", 0)


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the search for reference cycles while a million long-lived objects are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_alive(pid: int) -> bool:
    """Return whether a process with this id is running."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def disk_bytes_read() -> int | None:
    """Return the bytes that this process has read from disks so far; None if not counted.

    Bytes from the page cache are not included.
    """
    try:
        with open("/proc/self/io") as lines:
            counts = dict(line.split(": ") for line in lines)
        return int(counts["read_bytes"])
    except (OSError, ValueError, KeyError):  # another system, or no permission
        return None
