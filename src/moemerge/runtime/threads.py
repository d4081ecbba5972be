"""Thread pools that are whole from the start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from moemerge.errors import ResourceError


def thread_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """A pool with all its threads running.

    A pool of the standard library starts a thread when work comes. Where the system refuses one,
    that work stays queued for ever; here it is refused before any work begins.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
    go_on = threading.Event()
    try:
        for _ in range(threads):
            pool.submit(go_on.wait)
    except RuntimeError as error:
        pool.shutdown(wait=False, cancel_futures=True)
        raise ResourceError(
            f"the system starts no thread for {name} ({error})",
            hint="raise the limits on memory and processes (ulimit -v, ulimit -u)",
        ) from error
    finally:
        go_on.set()
    return pool
