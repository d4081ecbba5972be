"""This process: whose it is, what it keeps of freed memory, its threads, quicker imports."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from moemerge.errors import ResourceError

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# Buffers up to this size are reused. Each that is given back instead comes again as zeroed pages,
# one fault at a time, which costs more than merging what they hold.
REUSED_BYTES = 256 * 2**20
# And where memory matters more than that, up to this size only: larger ones are the system's again
# as soon as they are freed, and leave no gaps that others do not fit into.
SMALL_BYTES = 2**20
# oneDNN keeps a kernel, about half a megabyte, for every shape of the last 1024 that it met. Every
# expert gets another number of tokens, so hardly any of them comes again.
KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
KEPT_KERNELS = 64
# Address space that a new thread may take: its stack (8 MiB as a rule), and what it computes with.
THREAD_BYTES = 32 * 2**20

_process_is_ours = False
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the latter: before 2.9


def own_process() -> None:
    """Said by a program that does nothing but this package's work, before it loads torch: how it
    takes memory, of the host and of a GPU, may be changed for good. In a caller's process it is not
    ours to change."""
    global _process_is_ours
    _process_is_ours = True
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # A GPU's memory in pieces that grow: what was freed between others is not lost to larger
        # tensors. torch reads this with its first use of a GPU.
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def is_ours() -> bool:
    """Whether `own_process` was said."""
    return _process_is_ours


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def reuse_freed_memory() -> None:
    """Tell glibc to keep freed buffers; does nothing elsewhere. Lasts as long as the process."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, REUSED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * REUSED_BYTES)


def share_one_heap() -> bool:
    """New threads take memory from the heaps there are, and freed buffers are reused by all.

    For many threads of which one runs at a time: with a heap each, every one would have to fault
    its own pages in, and keep them. Lasts as long as the process, so it is done where that is ours
    alone (see `own_process`); tells whether it was.
    """
    if not is_ours() or not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
        reuse_freed_memory()
        return True
    return False


def give_back_large_buffers() -> None:
    """From now on every large buffer goes back to the system when it is freed, in a process that is
    ours alone. For work with a few large matrices at a time, each of which takes long."""
    if not is_ours() or not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, SMALL_BYTES)


def give_back_freed_memory() -> None:
    """Tell glibc to return what it keeps of freed buffers; does nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def keep_few_kernels() -> None:
    """Bound oneDNN's cache, unless the user did; it must not have computed anything yet."""
    os.environ.setdefault(KERNELS, str(KEPT_KERNELS))


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool with all its threads running.

    A pool of the standard library starts a thread when work comes. Where the system refuses one,
    that work stays queued for ever; here it is refused before any work begins.
    """
    _require_room(threads, name)
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    go_on = threading.Event()
    try:
        for _ in range(threads):
            pool.submit(go_on.wait)
    except RuntimeError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise _no_thread(name, error) from error
    finally:
        go_on.set()
    return pool


def side_by_side(works: Sequence[Callable[[], object]], name: str) -> None:
    """Do all of these at once, each in a thread of its own. All end; the first error is raised."""
    if not works:
        return
    with thread_pool(len(works), name) as pool:
        begun = [pool.submit(work) for work in works]
    for one in begun:
        one.result()


def start_thread(thread: threading.Thread) -> None:
    """Start it; an error of ours where the system refuses."""
    _require_room(1, thread.name)
    try:
        thread.start()
    except RuntimeError as error:
        raise _no_thread(thread.name, error) from error


def _require_room(threads: int, name: str) -> None:
    """A thread that finds no memory in its first moments dies without a word, and Python waits for
    ever for it to begin."""
    try:
        mmap.mmap(-1, threads * THREAD_BYTES).close()
    except (OSError, MemoryError) as error:
        raise _no_thread(name, error) from error


def _no_thread(name: str, error: BaseException) -> ResourceError:
    return ResourceError(
        f"the system starts no thread for {name} ({error})",
        hint="raise the limits on memory and processes (ulimit -v, ulimit -u)",
    )


def wake_gpu(device: str) -> None:
    """Begin to make a GPU's context: that takes as long as many an import, which can go on
    meanwhile, as the driver needs no lock of Python's. Whether the device is there is for others
    to tell, and processes of one job find theirs later."""
    number = device.partition(":")[2] or "0"
    if device == "cpu" or not number.isdecimal() or "WORLD_SIZE" in os.environ:
        return
    waking = threading.Thread(target=_make_context, args=(int(number),), daemon=True)
    with suppress(ResourceError):
        start_thread(waking)


def _make_context(number: int) -> None:
    """Make the device's primary context, which torch uses, too."""
    with suppress(OSError, AttributeError):  # no driver here, or one that is very old
        driver = ctypes.CDLL("libcuda.so.1")
        ordinal, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(ordinal), number) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """For imports: what they make stays, so looking through it for garbage, over and over as it
    grows, is in vain. It is left out of later searches as well."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
