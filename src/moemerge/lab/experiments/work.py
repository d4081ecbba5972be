"""Run work items that depend on each other in worker processes, as they become ready."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from types import ModuleType
from typing import Any

from moemerge.errors import ResourceError
from moemerge.runtime.devices import share_memory

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class WorkItem:
    """A call that can be sent to another process, once the items in `after` are done."""

    key: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    after: tuple[str, ...] = ()
    # called in this process when all items that need this one are done
    then: Callable[[], None] | None = None
    rank: tuple[float, ...] = ()  # of two ready items, the lower one runs first


@dataclass(frozen=True)
class Outcome:
    """How an item ended. `error` is its exception, or the key of the failed item it waited for."""

    item: WorkItem
    result: Any = None
    error: BaseException | str | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    gpu_broken: bool = False  # the CUDA context is unusable after this error


@dataclass(frozen=True)
class Workers:
    """The number of processes, and what each may use."""

    count: int
    threads: int = 1  # per worker: workers that all use every core slow each other down
    gpus: tuple[str, ...] = ()  # assigned to workers round-robin; as in CUDA_VISIBLE_DEVICES


def run_work(items: Sequence[WorkItem], workers: Workers) -> Iterator[Outcome]:
    """Run all work items, some in parallel, and yield each outcome as it ends.

    An item is skipped if one it depends on failed. A single worker is this process itself, unless
    it uses a GPU: after a CUDA error only a new process can use the GPU. If a worker dies, the
    items that were running are repeated one by one. An item has failed if it kills its worker twice
    while alone.
    """
    state = _State(items)
    if workers.count == 1 and not workers.gpus:
        while state.ready:
            yield from state.finish(_attempt(state.take_ready(1)[0]))
        return
    suspects: list[WorkItem] = []  # items that were running when a worker died
    deadly: set[str] = set()  # items that were running alone
    with _WorkerPool(workers) as pool:
        while state.ready or suspects or pool.running:
            if suspects and not pool.running:
                pool.start(suspects.pop(0))
            elif not suspects and not pool.stale:
                # No more than can run at once: items that become ready meanwhile may be more
                # urgent.
                for item in state.take_ready(workers.count - len(pool.running)):
                    pool.start(item)
            ended, lost = pool.wait()
            for outcome in ended:
                yield from state.finish(outcome)
            alone = {item.key for item in lost if len(lost) == 1}
            if alone & deadly:
                what = "a worker process died of this, most likely for want of memory"
                error = ResourceError(what, hint="use fewer `jobs`")
                yield from state.finish(Outcome(lost[0], error=error))
            else:
                suspects += lost
            deadly |= alone


def _attempt(item: WorkItem) -> Outcome:
    begin, cpu = time.perf_counter(), time.process_time()
    try:
        result = item.call(*item.args)
    except Exception as error:
        return Outcome(item, error=_sendable(error), gpu_broken=_breaks_gpu(error))
    return Outcome(item, result, None, time.perf_counter() - begin, time.process_time() - cpu)


_lame: list[bool] = []  # set in a worker


def _work(item: WorkItem) -> Outcome:
    """Run an item in a worker. A worker with an unusable GPU refuses items, which are then
    repeated.
    """
    if _lame:
        os._exit(1)
    outcome = _attempt(item)
    if outcome.gpu_broken:
        _lame.append(True)
    return outcome


def _sendable(error: Exception) -> Exception:
    """Return the error itself if another process can unpickle it: some can only be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error class may define its own pickling, which may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _breaks_gpu(error: BaseException | None) -> bool:
    """Return whether every later use of the GPU in this process will fail after this error."""
    while error is not None:
        if type(error).__name__ == "AcceleratorError":  # torch's class; torch is not imported here
            return True
        error = error.__cause__ or error.__context__
    return False


class _WorkerPool:
    """Worker processes. All are replaced once one has died or become unusable."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self.running: dict[Future[Outcome], WorkItem] = {}
        self.stale = False  # no more items until the workers are replaced

    def start(self, item: WorkItem) -> None:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._workers.count,
                context,
                initializer=_start_worker,
                initargs=(context.Value("i", 0), self._workers),
            )
        try:
            with _without_main():
                # `then` is called in this process, so it need not be picklable.
                self.running[self._pool.submit(_work, replace(item, then=None))] = item
        except BrokenProcessPool as error:  # a worker died meanwhile
            future: Future[Outcome] = Future()
            future.set_exception(error)
            self.running[future] = item

    def wait(self) -> tuple[list[Outcome], list[WorkItem]]:
        """Return ended items, at least one, and items that were lost with a worker."""
        done, _ = wait(self.running, return_when=FIRST_COMPLETED)
        if any(isinstance(future.exception(), BrokenProcessPool) for future in done):
            done, _ = wait(self.running)  # they have all ended with it
            self.stale = True
        ended: list[Outcome] = []
        lost: list[WorkItem] = []
        for future in done:
            item, error = self.running.pop(future), future.exception()
            if isinstance(error, BrokenProcessPool):
                lost.append(item)
            elif error is not None:
                ended.append(Outcome(item, error=error))
            else:
                ended.append(replace(future.result(), item=item))
                self.stale |= ended[-1].gpu_broken
        if self.stale and not self.running:
            self._end()
        return ended, lost

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self.stale = None, False

    def __enter__(self) -> _WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
        else:
            self._end()


class _State:
    """The dependencies between items."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self._items = {item.key: item for item in items}
        self._order = {item.key: number for number, item in enumerate(items)}
        self._sorter = TopologicalSorter({item.key: item.after for item in items})
        self._sorter.prepare()
        self._users = Counter(key for item in items for key in item.after)
        self._failed: set[str] = set()
        self.ready = [self._items[key] for key in self._sorter.get_ready()]

    def take_ready(self, count: int) -> list[WorkItem]:
        """Return the most urgent items that can run now."""
        self.ready.sort(key=lambda item: (item.rank, self._order[item.key]))
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    def finish(self, outcome: Outcome) -> Iterator[Outcome]:
        """Record the end of an item: free what was last used, and release or skip those that
        waited for it.
        """
        yield outcome
        ended = outcome.item
        if outcome.error is not None:
            self._failed.add(ended.key)
        self._users.subtract(ended.after)
        for key in (*ended.after, ended.key):
            then = self._items[key].then
            if then is not None and not self._users[key]:
                then()
        self._sorter.done(ended.key)
        for key in sorted(self._sorter.get_ready(), key=self._order.__getitem__):
            item = self._items[key]
            missing = next((other for other in item.after if other in self._failed), None)
            if missing is None:
                self.ready.append(item)
            else:
                yield from self.finish(Outcome(item, error=f"needed: {missing}"))


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep new processes from running the caller's script again.

    Workers do not need it. A script without a `__main__` guard would start the whole work again in
    each.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker(number: Any, workers: Workers) -> None:
    """Restrict this process to its own cores, GPU and share of memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with number.get_lock():
        mine = number.value
        number.value += 1
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[mine % len(cores) :: workers.count][: workers.threads]
        os.sched_setaffinity(0, own)
    if workers.gpus:
        # CUDA reads it at its first use, which comes later.
        os.environ[VISIBLE_GPUS] = workers.gpus[mine % len(workers.gpus)]
    share_memory(cpu=workers.count, cuda=-(-workers.count // max(1, len(workers.gpus))))
    for name in THREADS:  # torch reads it when the first item that needs it imports torch
        os.environ[name] = str(workers.threads)


def _end_with_parent() -> None:
    """End with the parent: a killed parent cannot end its workers, which would disturb a resumed
    run.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
