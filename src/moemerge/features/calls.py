"""What modules are given, and what they give, while batches run through a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moemerge.features.workers import Worker, current_worker
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
