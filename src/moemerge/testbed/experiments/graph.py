"""Tasks that wait for each other, run by worker processes as they become ready."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moemerge.errors import DataError, ResourceError
from moemerge.testbed.experiments.bench import Scale
from moemerge.testbed.experiments.recipes import Cell, SetKey
from moemerge.testbed.training.sets import MANIFEST


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


def run_tasks(tasks: Sequence[Task], jobs: int) -> Iterator[Outcome]:
    """Run all tasks, `jobs` at once, and tell how each ended, as it ends.

    A task whose predecessor failed is not run. One job runs in this very process; more of them
    run in processes with one core each.
    """
    state = _State(tasks)
    if jobs == 1:
        while state.ready:
            yield from state.finish(_run_here(state.take_ready(1)[0]))
        return
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", 0)
    with ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(number,)) as pool:
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


def _start_worker(number: Any) -> None:
    """Keep this process to a core of its own: workers that each use all of them only wait."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    with number.get_lock():
        mine = number.value
        number.value += 1
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[mine % len(cores)]})
    torch.set_num_threads(1)


CELLS = "cells.jsonl"
TASKS = "tasks.jsonl"

Key = tuple[str, str]  # a set's name, a cell's name


def set_digest(trained: Path) -> str:
    """Tells one training of a set from another: its manifest has settings, losses and the date."""
    return hashlib.sha256((trained / MANIFEST).read_bytes()).hexdigest()[:16]


class CellJournal:
    """The cells of one output folder, measured at one scale."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.path = folder / CELLS
        self._scale = asdict(scale)
        self._found: dict[Key, dict[str, Any]] = {}
        for entry in self._entries():
            if entry["scale"] == self._scale:
                key = SetKey(**entry["set"])
                self._found[key.name, entry["cell"]] = entry

    def _entries(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError:
                if number == len(lines) and not line.endswith("\n"):
                    self._cut(lines[:-1])  # a run was killed while it wrote this line
                    return
                raise DataError(
                    f"{self.path}, line {number}: not JSON", hint="remove the line, or the file"
                ) from None

    def _cut(self, whole: list[str]) -> None:
        self.path.write_text("".join(whole), encoding="utf-8")

    def add(self, key: SetKey, cell: Cell, result: Mapping[str, Any]) -> None:
        """Note a finished cell; it is on disk when this returns."""
        entry = {"set": key.to_json(), "cell": cell.name, "scale": self._scale, **result}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self._found[key.name, cell.name] = entry

    def add_task(self, key: str, seconds: float, cpu_seconds: float) -> None:
        """Note what a task took; nothing depends on it, but it tells where the time goes."""
        entry = {"task": key, "seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds, 2)}
        with self.path.with_name(TASKS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def has(self, key: SetKey, cell: Cell, digest: str | None) -> bool:
        """Whether a cell was measured on the set with this digest; None stands for any set."""
        entry = self.get(key, cell)
        return entry is not None and digest in (None, entry.get("trained"))

    def get(self, key: SetKey, cell: Cell) -> dict[str, Any] | None:
        return self._found.get((key.name, cell.name))
