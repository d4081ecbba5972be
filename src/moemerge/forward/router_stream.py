"""Stream a model and stop at its routers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.forward.old_stream import ModelStream
from moemerge.forward.routers import RouterModule
from moemerge.forward.settings import StreamSettings
from moemerge.forward.stops import Arrival, Pause, Stop
from moemerge.forward.weights import Weights
from moemerge.text.batches import Batch


class RouterStop(Stop):
    """A stop before a router z = W x (+ b)."""

    def __init__(
        self, pause: Pause, router: RouterModule, weights: Weights, arrivals: Sequence[Arrival]
    ) -> None:
        super().__init__(pause, router.layer, weights, arrivals)
        self._router = router
        self.weight_name = self._on_disk(router.weight)
        self.bias_name = None if router.bias is None else self._on_disk(router.bias)

    @property
    def weight(self) -> Tensor:
        """The router's weight in memory, (experts, d)."""
        return self._weights.model.get_parameter(self._router.weight).detach()

    @property
    def bias(self) -> Tensor | None:
        """The bias that is added to the logits, (experts,), or None."""
        name = self._router.bias
        return None if name is None else self._weights.model.get_parameter(name).detach()

    def _on_disk(self, name: str) -> str:
        stored = self._weights.names.on_disk(name)
        if stored is None:
            label = self._weights.checkpoint.label
            raise ArchitectureError(f"{label}: {name} is not stored as one tensor of its own")
        return stored


class RouterStream(ModelStream):
    """Iterate to get a `RouterStop` at every router, in the order of the model's forward.

    `layers` restricts the stops. Layers below the last stop run anyway.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        batches: Sequence[Batch],
        settings: StreamSettings | None = None,
        *,
        layers: Collection[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, batches, settings, **options)
        routers = self.anatomy.routers
        self._routers = {r.path: r for r in routers if layers is None or r.layer in layers}
        if not self._routers and self._on_output is None:
            raise ArchitectureError(
                f"{checkpoint.label}: no router to stop at",
                hint=f"layers with a router: {sorted({r.layer for r in routers}) or 'none'}",
            )
        self.stop_before(self._routers, "router")

    def __iter__(self) -> Iterator[RouterStop]:
        return super().__iter__()

    def _stop(self, pause: Pause, arrivals: Sequence[Arrival], shared: bool) -> RouterStop:
        return RouterStop(pause, self._routers[pause.key], self.weights, arrivals)
