"""What a stream hands out: where it stops, and what modules were given and gave on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemerge.errors import UsageError
from moemerge.features.weights import Weights
from moemerge.features.workers import Pause, PauseKind, Worker, current_worker
from moemerge.text.batches import Batch


@dataclass(frozen=True, eq=False)
class Call:
    """One batch's call of a module: what it was given, and what it gave where that is asked for."""

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Any = None

    def argument(self, position: int, *names: str) -> Any:
        """An argument by its position, or by one of the names it may be given under."""
        if position < len(self.args):
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)


# A batch, the places of its real tokens (None: all), and the calls since it last waited.
OnCalls = Callable[[Batch, Tensor | None, list[Call]], None]


class CallLog:
    """Calls since a batch last waited (one batch runs at a time), for those who listen."""

    def __init__(self) -> None:
        self._listeners: list[OnCalls] = []
        self._calls: list[Call] = []

    def listen(
        self, model: nn.Module, paths: Iterable[str], on_calls: OnCalls, *, outputs: bool
    ) -> list[RemovableHandle]:
        """Record the calls of these modules; gives the hooks that do."""
        if on_calls not in self._listeners:
            self._listeners.append(on_calls)
        hooks = []
        for path in paths:
            module = model.get_submodule(path)
            hooks.append(
                module.register_forward_hook(self._after(path), with_kwargs=True)
                if outputs
                else module.register_forward_pre_hook(self._before(path), with_kwargs=True)
            )
        return hooks

    def hand_out(self, worker: Worker) -> None:
        """A batch waits: its calls go to the listeners, and are forgotten here."""
        calls, self._calls = self._calls, []
        for on_calls in self._listeners:
            on_calls(worker.batch, worker.rows, calls)

    def _before(self, path: str) -> Callable[..., None]:
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if current_worker() is not None:
                self._calls.append(Call(path, args, dict(kwargs)))

        return hear

    def _after(self, path: str) -> Callable[..., None]:
        def hear(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
        ) -> None:
            if current_worker() is not None:
                self._calls.append(Call(path, args, dict(kwargs), out))

        return hear


@dataclass(frozen=True, eq=False)
class Arrival:
    """One batch at a stop, and the tensors it is about to give the module: rows of real tokens."""

    batch: Batch
    given: tuple[Tensor, ...]


class Stop:
    """All batches wait here: read what they bring, replace weights, go on.

    Valid until the iteration continues; inputs that are not held elsewhere are freed then.
    """

    def __init__(
        self,
        pause: Pause,
        layer: int,
        weights: Weights,
        arrivals: Sequence[Arrival],
        shared: bool = False,
    ) -> None:
        self.kind: PauseKind = pause.kind
        self.path = pause.key  # of the module or layer that is about to run
        self.layer = layer  # that runs; at a layer's stop the one to come, at the end one more
        # Whether every batch brings the very tensor that it brought to the stop before.
        self.shared = shared
        self._arrivals = arrivals
        self._weights = weights

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arrival.batch.domain for arrival in self._arrivals))

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """Every batch with all tensors it brings; empty where none were asked for."""
        return self._arrivals

    def inputs(self, domain: str, *, holdout: bool = False) -> list[Tensor]:
        """The module's inputs, a (tokens, d) tensor per batch, padding left out."""
        return [x for _, x in self.by_batch(domain, holdout=holdout)]

    def by_batch(self, domain: str, *, holdout: bool = False) -> list[tuple[Batch, Tensor]]:
        """The same with the batch each comes from, to pair tokens of several models."""
        if domain not in self.domains:
            raise UsageError(f"no domain {domain!r}; there are {', '.join(self.domains)}")
        return [
            (arrival.batch, arrival.given[0])
            for arrival in self._arrivals
            if arrival.batch.domain == domain and arrival.batch.holdout == holdout
        ]

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with these parameters, by name in memory: rounded to the dtype they are stored in.

        A tensor that has this dtype already is taken as it is; any other must be finite once it is
        rounded.
        """
        for name, value in tensors.items():
            self._weights.put(name, value)

    def replace_stored(self, tensors: Mapping[str, Tensor]) -> None:
        """The same by name on disk, for parameters that are stored as one tensor each."""
        self.replace({self._weights.names.in_memory(n): t for n, t in tensors.items()})

    def release(self) -> None:
        self._arrivals = ()


def take_over_inputs(first_layer: nn.Module) -> RemovableHandle:
    """Let the layer alone hold what embeddings gave it.

    A model's code keeps that in a variable until it returns, and so a state of every token, though
    nothing reads it any more. The hook comes before all others: they would keep the variable's.
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
    """The same values in another tensor. The one that is left holds NaN in one place of memory:
    code that reads it after all is found out."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    taken = value.detach()
    value.data = value.new_full((), torch.nan).expand(value.shape)
    return taken
