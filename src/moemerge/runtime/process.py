"""Settings of this process: memory allocation and threads."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from moemerge.errors import ResourceError

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# glibc keeps freed buffers up to this size. A buffer that was returned to the system comes back as
# zeroed pages, one fault at a time, which costs more than merging its contents.
REUSED_BYTES = 256 * 2**20
# If memory matters more, only up to this size. Larger buffers return to the system when they are
# freed, and leave no gaps in the heap.
SMALL_BYTES = 2**20
# oneDNN caches a kernel of about half a megabyte for each of the last 1024 shapes. Every expert has
# another number of tokens, so a cached kernel is hardly ever used again.
KERNEL_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
CACHED_KERNELS = 64
# Address space that a new thread may take: its stack (usually 8 MiB) and its buffers.
THREAD_BYTES = 32 * 2**20
# torch for ARM allocates with mimalloc, which returns a freed buffer to the system after 10 ms. The
# next block of a merge often needs it later than that.
MIMALLOC_DELAY = "MIMALLOC_PURGE_DELAY"
DELAY_MS = 1000

_is_configured = False  # whether `configure_process` was called
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter: before 2.9


def configure_process() -> None:
    """Allow this package to change how the process allocates memory, on the host and on a GPU.

    The command line calls it before it imports torch. A library must not: such settings last as
    long as the process, and the process is the caller's.
    """
    global _is_configured
    _is_configured = True
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # Segments that grow: memory freed between others can still serve larger tensors. torch
        # reads this when it first uses a GPU.
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    os.environ.setdefault(MIMALLOC_DELAY, str(DELAY_MS))


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


def _glibc(function: str, *arguments: int) -> bool:
    """Call glibc, and return whether this process uses it."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):  # another C library
            getattr(ctypes.CDLL(None), function)(*arguments)
            return True
    return False


def reuse_freed_memory() -> None:
    """Make glibc keep freed buffers, for the rest of the process; no effect elsewhere."""
    _glibc("mallopt", _M_MMAP_THRESHOLD, REUSED_BYTES)
    _glibc("mallopt", _M_TRIM_THRESHOLD, 2 * REUSED_BYTES)


def share_one_heap() -> bool:
    """Make all threads of a configured process share one heap; return whether they do.

    For many threads of which one runs at a time. If each had its own heap, each would fault in its
    own pages and keep them.
    """
    if not _is_configured or not _glibc("mallopt", _M_ARENA_MAX, 1):
        return False
    reuse_freed_memory()
    return True


def give_back_large_buffers() -> None:
    """Make glibc return large buffers when they are freed, for the rest of a configured process.

    For work with a few large matrices at a time.
    """
    if _is_configured:
        _glibc("mallopt", _M_MMAP_THRESHOLD, SMALL_BYTES)


def give_back_freed_memory() -> None:
    """Make glibc return the freed buffers that it keeps; no effect elsewhere."""
    _glibc("malloc_trim", 0)


def limit_kernel_cache() -> None:
    """Limit oneDNN's kernel cache, unless the user has; call it before oneDNN computes anything."""
    os.environ.setdefault(KERNEL_CACHE, str(CACHED_KERNELS))


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run already.

    A pool of the standard library starts a thread when work arrives. If the system refuses the
    thread, that work stays queued for ever; this function raises an error instead.
    """
    _require_memory(threads, name)
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    started = threading.Event()
    try:
        for _ in range(threads):
            pool.submit(started.wait)
    except RuntimeError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise _no_thread(name, error) from error
    finally:
        started.set()
    return pool


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise ResourceError if the system refuses."""
    _require_memory(1, thread.name)
    try:
        thread.start()
    except RuntimeError as error:
        raise _no_thread(thread.name, error) from error


def _require_memory(threads: int, name: str) -> None:
    """Raise an error if new threads would find no memory.

    A thread without memory for its first steps ends silently, and Python waits for it for ever.
    """
    try:
        mmap.mmap(-1, threads * THREAD_BYTES).close()
    except (OSError, MemoryError) as error:
        raise _no_thread(name, error) from error


def _no_thread(name: str, error: BaseException) -> ResourceError:
    return ResourceError(
        f"the system starts no thread for {name} ({error})",
        hint="raise the limits on memory and processes (ulimit -v, ulimit -u)",
    )
