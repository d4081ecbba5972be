"""Stream a model layer by layer and hear what its modules read on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moemerge.checkpoint.reader import Checkpoint
from moemerge.features.loading import NameMap
from moemerge.features.stops import RouterStop
from moemerge.features.stream import RouterStream
from moemerge.features.taps import Taps, find_taps
from moemerge.features.weights import Weights
from moemerge.features.workers import Worker, current_worker
from moemerge.text.batches import Batch


@dataclass(frozen=True, eq=False)
class Call:
    """A module was called: what it was given."""

    path: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def argument(self, place: int, *names: str) -> Any:
        """An argument by its place, or by one of the names it may be given under."""
        if place < len(self.args):
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)


class LayerStream(RouterStream):
    """Runs all layers without stopping at routers.

    `on_calls` gets, for each batch in turn, the calls of the modules in `listen` since the batch
    last waited; what they hold may be changed as soon as it returns. `on_layer` is called with a
    layer's number when every batch has passed it, its weights still in place.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        *,
        on_calls: Callable[[Batch, Tensor | None, list[Call]], None],
        on_layer: Callable[[int], None],
        on_output: Callable[[Batch, Tensor], None],
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, batches, layers=(), on_output=on_output, **options)
        self.taps: Taps = find_taps(self.model, self.anatomy)
        self._on_calls = on_calls
        self._on_layer = on_layer
        self._calls: list[Call] = []  # one batch runs at a time

    def __enter__(self) -> LayerStream:
        return self

    @property
    def names(self) -> NameMap:
        """Where each parameter is stored."""
        return self._weights.names

    @property
    def weights(self) -> Weights:
        return self._weights

    def listen(self, paths: Sequence[str]) -> None:
        """Record the calls of these modules from now on."""
        for path in paths:
            module = self.model.get_submodule(path)
            hook = module.register_forward_pre_hook(self._listener(path), with_kwargs=True)
            self._hooks.append(hook)

    def _listener(self, path: str) -> Callable[..., None]:
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if current_worker() is not None:
                self._calls.append(Call(path, args, dict(kwargs)))

        return hear

    def _stepped(self, worker: Worker) -> None:
        calls, self._calls = self._calls, []
        self._on_calls(worker.batch, worker.rows, calls)

    def _bring(self, layer: int) -> None:
        if self._layer is not None and layer != self._layer:
            self._on_layer(self._layer)
        super()._bring(layer)

    def _schedule(self) -> Iterator[RouterStop]:
        yield from super()._schedule()
        if self._layer is not None:
            self._on_layer(self._layer)
