"""Where the batches of a stream wait, with their inputs, and recorded calls of modules.

Every batch has a thread, which pauses inside the model's forward; only one of them runs at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemerge.errors import ArchitectureError
from moemerge.forward.routers import RouterModule
from moemerge.forward.spill import Spill, Tracker
from moemerge.forward.weights import Weights
from moemerge.text.batches import Batch


class Cancelled(BaseException):
    """Unwinds a paused thread. Not an Exception, so that model code cannot swallow it."""


@dataclass(frozen=True)
class Pause:
    """Where a batch waits: before the layer or module `key`, or at the end."""

    kind: Literal["layer", "module", "end"]
    key: str = ""


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
        self.value, self.others = None, ()
        if self.ident is None:
            self.start()
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
        self.value, self.others = None, ()

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


# --- recorded calls -------------------------------------------------------------------------------

Rerun = Callable[[nn.Module, Tensor], Any]  # calls a layer again, on other hidden states


@dataclass(frozen=True, eq=False)
class Call:
    """One batch's call of a module: its arguments and, if requested, its output."""

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any = None

    def argument(self, position: int, *names: str) -> Any:
        """Return an argument by its position, or by one of its possible names."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)

    def rerun(self) -> tuple[Tensor, Rerun] | None:
        """Return a layer's hidden states, and a function that calls it with others."""
        if self.args and isinstance(self.args[0], Tensor):
            rest, kwargs = self.args[1:], self.kwargs
            return self.args[0], lambda layer, x: layer(x, *rest, **kwargs)
        name = "hidden_states"
        if not isinstance(self.kwargs.get(name), Tensor):
            return None
        others = {key: value for key, value in self.kwargs.items() if key != name}
        return self.kwargs[name], lambda layer, x: layer(hidden_states=x, **others)


# Called with a batch, the positions of its real tokens (None: all) and its calls since it last
# waited.
OnCalls = Callable[[Batch, Tensor | None, list[Call]], None]


class CallLog:
    """Records calls of modules since a batch last waited; one batch runs at a time."""

    def __init__(self) -> None:
        self._listeners: list[OnCalls] = []
        self._calls: list[Call] = []

    def listen(
        self, model: nn.Module, paths: Iterable[str], on_calls: OnCalls, *, outputs: bool
    ) -> list[RemovableHandle]:
        """Record the calls of these modules; return the handles of the hooks."""
        if on_calls not in self._listeners:
            self._listeners.append(on_calls)
        handles = []
        for path in paths:
            module = model.get_submodule(path)
            register = module.register_forward_hook if outputs else module.register_forward_pre_hook
            handles.append(register(self._recorder(path), with_kwargs=True))
        return handles

    def hand_out(self, worker: Worker) -> None:
        """Pass the calls of a waiting batch to the listeners and forget them."""
        calls, self._calls = self._calls, []
        for on_calls in self._listeners:
            on_calls(worker.batch, worker.rows, calls)

    def _recorder(self, path: str) -> Callable[..., None]:
        def record(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = None
        ) -> None:
            if current_worker() is not None:
                self._calls.append(Call(path, args, dict(kwargs), out))

        return record


# --- stops ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Arrival:
    """One batch at a stop, and the module's inputs: rows of real tokens."""

    batch: Batch
    given: tuple[Tensor, ...]


class ModuleStop:
    """A module before which all batches of a stream wait, with its inputs.

    The inputs are valid until the stream runs on.
    """

    def __init__(
        self,
        path: str,
        layer: int,
        arrivals: Sequence[Arrival],
        same_input: bool,
        router: RouterModule | None,
        weights: Weights,
    ) -> None:
        self.path = path
        self.layer = layer
        self.arrivals = arrivals
        # Whether every batch has the very same input tensor as at the previous stop.
        self.same_input = same_input
        self.router = router  # None at any other module
        self._weights = weights

    def inputs(self, domain: str, *, holdout: bool = False) -> list[Tensor]:
        """Return the module's inputs without padding, a (tokens, d) tensor per batch."""
        return [x for _, x in self.by_batch(domain, holdout=holdout)]

    def by_batch(self, domain: str, *, holdout: bool = False) -> list[tuple[Batch, Tensor]]:
        """Return the inputs with their batches, to pair tokens of several models."""
        some = []
        for arrival in self.arrivals:
            if arrival.batch.domain == domain and arrival.batch.holdout == holdout:
                if not arrival.given:
                    raise ArchitectureError(f"the inputs of {self.path} are not the text's tokens")
                some.append((arrival.batch, arrival.given[0]))
        return some

    @property
    def weight(self) -> Tensor:
        """The router's weight in memory, (experts, d)."""
        assert self.router is not None
        return self._weights.model.get_parameter(self.router.weight).detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias that is added to the router's logits, (experts,), or None."""
        name = None if self.router is None else self.router.bias
        return None if name is None else self._weights.model.get_parameter(name).detach()

    @property
    def weight_name(self) -> str:
        """The name of the router's weight on disk."""
        assert self.router is not None
        stored = self._weights.names.on_disk(self.router.weight)
        if stored is None:
            raise ArchitectureError(
                f"{self._weights.checkpoint.label}: {self.router.weight} is not stored as one "
                "tensor of its own"
            )
        return stored


def take_over_inputs(first_layer: nn.Module) -> RemovableHandle:
    """Make the first layer the only owner of the embeddings' output.

    A model's code keeps that output in a variable until it returns, although nothing reads it any
    more: a hidden state of every token. The hook precedes all others, which would keep a reference.
    """

    def take_over(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if current_worker() is None:
            return None
        if args:
            return (_taken_over(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs), None)
        return None if name is None else (args, {**kwargs, name: _taken_over(kwargs[name])})

    return first_layer.register_forward_pre_hook(take_over, with_kwargs=True, prepend=True)


def _taken_over(value: Any) -> Any:
    """Return the values in another tensor and fill the old one with NaN.

    The NaN takes one element of memory, and reveals code that reads the old tensor after all.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    taken = value.detach()
    value.data = value.new_full((), torch.nan).expand(value.shape)
    return taken
