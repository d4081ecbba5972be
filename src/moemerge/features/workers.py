"""One thread per batch, paused inside the model's forward; only one of them runs at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moemerge.features.spill import Emptied, Spill, Tracker
from moemerge.runtime.process import start_thread
from moemerge.text.batches import Batch


class Cancelled(BaseException):
    """Unwinds a paused thread. Not an Exception, so that model code cannot swallow it."""


PauseKind = Literal["layer", "module", "router", "end"]


@dataclass(frozen=True)
class Pause:
    """Where a batch waits: before a layer, module or router `key`, or at the end."""

    kind: PauseKind
    key: str = ""


def part_of_a_layer(begin: str, end: str) -> str:
    """Return the name in the timings of the work between two kinds of pauses."""
    if "module" in (begin, end):
        return "modules"
    if begin == "start":
        return "embeddings"
    if begin == "router":
        return "experts"
    return "attention" if end == "router" else "other layers"


class Worker(threading.Thread):
    """Runs `forward(batch)` and waits when a hook calls `pause`."""

    def __init__(
        self, number: int, batch: Batch, forward: Callable[[Batch], Tensor], spill: Spill | None
    ) -> None:
        # A daemon: an interpreter that ends without `close` must not wait for a paused thread.
        super().__init__(name=f"moemerge-batch-{number}", daemon=True)
        self.batch = batch
        self.rows: Tensor | None = None  # positions of real tokens, None without padding
        self.at = Pause("end")
        self.value: Tensor | None = None  # the hook's hidden states or module input
        self.others: tuple[Tensor, ...] = ()  # further tensor arguments of the module
        self.error: BaseException | None = None
        self.emptied: Emptied | None = None  # a tensor whose memory was released meanwhile
        self._forward: Callable[[Batch], Tensor] | None = forward
        self._spill = spill
        self._tracker = None if spill is None else Tracker()
        self._go = threading.Semaphore(0)
        self._parked = threading.Semaphore(0)
        self._cancelled = False

    def real(self, tokens: Tensor, *, copy: bool) -> Tensor:
        """Return the rows of real tokens, (tokens, d)."""
        if self.rows is not None:
            return tokens.index_select(0, self.rows)
        return tokens.clone() if copy else tokens

    # --- called by the scheduler ---

    def step(self) -> None:
        """Run until the next pause; afterwards `at`, `value` and `error` are set."""
        if self._spill is not None:
            self._spill.back()
        if self.emptied is not None:
            self.emptied.refill()
            self.emptied = None
        self.value, self.others = None, ()
        if self.ident is None:
            start_thread(self)
        self._go.release()
        self._parked.acquire()

    def put_away(self, keep: set[int], smallest: int) -> None:
        """Offload the activations of this paused batch."""
        if self._spill is not None and self._tracker is not None:
            self.value, self.others = None, ()
            self._spill.out(self._tracker.alive(), keep, smallest)

    def cancel(self) -> None:
        """End the thread and wait for it.

        A thread that still computes, after an interrupt of the caller, ends at its next pause.
        """
        self._cancelled = True
        self._go.release()
        if self.ident is not None:
            self.join()
        self.value, self.others, self.emptied = None, (), None

    # --- called in the thread itself ---

    def pause(self, at: Pause, value: Tensor, others: tuple[Tensor, ...] = ()) -> None:
        self.at, self.value, self.others = at, value, others
        del value, others
        self._parked.release()
        self._go.acquire()
        if self._cancelled:
            raise Cancelled

    def run(self) -> None:
        forward, self._forward = self._forward, None
        assert forward is not None
        self._go.acquire()
        try:
            if not self._cancelled:
                with torch.no_grad(), self._tracker or contextlib.nullcontext():
                    self.value = forward(self.batch)
            self.at = Pause("end")
        except Cancelled:
            pass
        except BaseException as error:  # the scheduler raises it in the caller's thread
            self.error = error
        finally:
            self._parked.release()


def current_worker() -> Worker | None:
    thread: Any = threading.current_thread()
    return thread if isinstance(thread, Worker) else None
