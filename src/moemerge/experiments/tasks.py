"""Tasks that wait for each other, run by worker processes as they become ready."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import torch

from moemerge.errors import ResourceError

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Task:
    """A call that can be sent to another process, once the tasks `after` are done."""

    key: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    after: tuple[str, ...] = ()
    then: Callable[[], None] = field(default=lambda: None)  # here, when all that needed it is done
    rank: tuple[float, ...] = ()  # of two tasks that are ready, the lower goes first


@dataclass(frozen=True)
class Outcome:
    """How a task ended. `error` is what it raised, or names the task that it waited for in vain."""

    task: Task
    result: Any = None
    error: BaseException | str | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class Workers:
    """How many processes work at once, and what each may use."""

    count: int
    threads: int = 1  # of each: workers that each use all cores only wait for each other
    gpus: tuple[str, ...] = ()  # one for each worker, in turn; as CUDA_VISIBLE_DEVICES names them


def run_tasks(tasks: Sequence[Task], workers: Workers) -> Iterator[Outcome]:
    """Run all tasks, some at once, and tell how each ended, as it ends.

    A task whose predecessor failed is not run. A single worker is this very process.
    """
    state, jobs = _State(tasks), workers.count
    if jobs == 1:
        while state.ready:
            yield from state.finish(_run_here(state.take_ready(1)[0]))
        return
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", 0)
    start = (number, workers)
    with ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=start) as pool:
        running: dict[Future[Any], Task] = {}
        try:
            while state.ready or running:
                # No more than can run: what becomes ready meanwhile may be more urgent.
                for task in state.take_ready(jobs - len(running)):
                    running[pool.submit(_timed, task.call, task.args)] = task
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from state.finish(_outcome(running.pop(future), future))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def _timed(call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, float, float]:
    begin, cpu = time.perf_counter(), time.process_time()
    result = call(*args)
    return result, time.perf_counter() - begin, time.process_time() - cpu


def _outcome(task: Task, future: Future[Any]) -> Outcome:
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise ResourceError(
            "a worker process died, most likely for want of memory", hint="use fewer `jobs`"
        ) from error
    if error is not None:
        return Outcome(task, error=error)
    result, seconds, cpu_seconds = future.result()
    return Outcome(task, result, seconds=seconds, cpu_seconds=cpu_seconds)


def _run_here(task: Task) -> Outcome:
    future: Future[Any] = Future()
    try:
        future.set_result(_timed(task.call, task.args))
    except Exception as error:  # as a worker process would hand it over
        future.set_exception(error)
    return _outcome(task, future)


class _State:
    """Which tasks wait for which."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._waiting = {task.key: set(task.after) for task in tasks}
        self._tasks = {task.key: task for task in tasks}
        self._order = {task.key: number for number, task in enumerate(tasks)}
        self._needed_by: dict[str, set[str]] = {task.key: set() for task in tasks}
        for task in tasks:
            for key in task.after:
                self._needed_by[key].add(task.key)
        self.ready = [task for task in tasks if not task.after]

    def take_ready(self, count: int) -> list[Task]:
        """The most urgent of what can be run now."""
        self.ready.sort(key=lambda task: (task.rank, self._order[task.key]))
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    def finish(self, outcome: Outcome) -> Iterator[Outcome]:
        """Note an end: release who waited for it, or give those up; let go what was used last."""
        yield outcome
        key = outcome.task.key
        for other in sorted(self._needed_by[key], key=self._order.__getitem__):
            waiting = self._waiting.get(other)
            if waiting is None:
                continue  # given up already
            if outcome.error is not None:
                del self._waiting[other]
                yield from self.finish(Outcome(self._tasks[other], error=f"needed: {key}"))
                continue
            waiting.discard(key)
            if not waiting:
                self.ready.append(self._tasks[other])
        for earlier in outcome.task.after:
            self._needed_by[earlier].discard(key)
            if not self._needed_by[earlier]:
                self._tasks[earlier].then()
        if not self._needed_by[key]:
            outcome.task.then()


def _start_worker(number: Any, workers: Workers) -> None:
    """Keep this process to its own cores and GPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with number.get_lock():
        mine = number.value
        number.value += 1
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        own = cores[mine % len(cores) :: workers.count][: workers.threads]
        os.sched_setaffinity(0, own)
    if workers.gpus:
        # CUDA looks at it when it is first used, which nothing has done yet.
        os.environ[VISIBLE_GPUS] = workers.gpus[mine % len(workers.gpus)]
    torch.set_num_threads(workers.threads)


def _end_with_parent() -> None:
    """A killed parent cannot end us, and who resumes its work would meet us at it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
