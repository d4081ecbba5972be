"""Collect statistics of the inputs of linear maps: Gram matrices or mean sizes.

Dense inputs are summed batch by batch. Inputs of experts are stored until the layer is finished and
then summed expert by expert, so that only one expert's matrix is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moemerge.architectures.roles import Unit
from moemerge.collecting.maths import Magnitude, Moment, Power, Routed, TokenSum
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import ArchitectureError
from moemerge.features.stops import Call
from moemerge.features.stream import ModelStream
from moemerge.features.taps import (
    ExpertKey,
    ExpertsTap,
    ExpertView,
    LinearTap,
    UnitMap,
    head_input,
    linear_weights,
)
from moemerge.features.tokens import real_tokens
from moemerge.statistics import StatisticsWriter
from moemerge.statistics.file import pack_symmetric, packed_size
from moemerge.text.batches import Batch

Shapes = dict[str, tuple[int, ...]]
# Tokens of one expert that are processed at once.
EXPERT_TOKENS = 16384


@dataclass
class _Layer:
    """The inputs recorded in the current layer."""

    moments: dict[str, TokenSum] = field(default_factory=dict)  # by the path that came first
    shares: dict[str, str] = field(default_factory=dict)  # path -> the path whose input it shares
    routed: dict[str, Routed] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Form:
    """A statistic of inputs, and its form in the file."""

    new: Callable[[], TokenSum]
    stored: Callable[[Tensor], Tensor]
    size: Callable[[int], int]  # of what is stored for inputs of a width


INPUT_FORMS = {
    "gram": Form(Moment, pack_symmetric, packed_size),
    "activation": Form(Magnitude, Tensor.contiguous, int),
    "power": Form(Power, Tensor.contiguous, int),
}


class InputCollector:
    """Records the inputs of a stream and writes Gram matrices or mean sizes."""

    def __init__(self, writer: StatisticsWriter | None, kind: StatisticsKind) -> None:
        """`writer` is rank 0's: other ranks only add to the sums."""
        self._writer = writer
        self._form = INPUT_FORMS[kind]
        self._layer = _Layer()
        self._head = self._form.new()
        self._headless = False
        self.unvisited: list[str] = []  # units of experts that no token was routed to
        self.notices: list[str] = []

    def attach(self, stream: ModelStream, units: UnitMap) -> None:
        """Start recording."""
        self._stream = stream
        self._units = units
        self._taps = {tap.path: tap for taps in stream.taps.layers for tap in taps}
        stream.listen(self._taps, self.on_calls)
        stream.stop_at_layers()
        if stream.taps.notice:
            self.notices.append(stream.taps.notice)

    # --- recording ---

    def on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        """Record the inputs of one batch in one layer."""
        last: tuple[str, Any] = ("", None)  # path and input of the last call
        for call in calls:
            tap = self._taps[call.path]
            x = call.argument(0, "hidden_states", "input", "x")
            if isinstance(tap, ExpertsTap):
                self._keep(tap, x, _chosen(call), batch, rows)
                continue
            leader = self._layer.shares.setdefault(tap.path, last[0] if x is last[1] else tap.path)
            if leader == tap.path:
                self._count(tap, x, batch, rows)
                last = (tap.path, x)

    def _count(self, tap: LinearTap, x: Tensor, batch: Batch, rows: Tensor | None) -> None:
        tokens = real_tokens(x, batch, rows)
        if tokens is None:
            self._layer.unreadable.add(tap.path)
        else:
            self._layer.moments.setdefault(tap.path, self._form.new()).add(tokens.detach())

    def _keep(
        self, tap: ExpertsTap, x: Tensor, chosen: Tensor, batch: Batch, rows: Tensor | None
    ) -> None:
        tokens, places = real_tokens(x, batch, rows), real_tokens(chosen, batch, rows)
        if tokens is None or places is None:
            raise ArchitectureError(f"{tap.path} is not given all tokens of a batch")
        if rows is None:  # otherwise it is already a copy
            tokens, places = tokens.clone(), places.clone()
        self._layer.routed.setdefault(tap.path, Routed(tap.count)).add(tokens, places)

    def on_output(self, batch: Batch, hidden: Tensor) -> None:
        """Record the final hidden states, the head's inputs."""
        head = self._stream.taps.head
        if head is None or self._headless:
            return
        try:
            x = head_input(self._stream.model, self._stream.anatomy.owner, head, hidden)
        except ArchitectureError as error:
            self._headless = True
            self.notices.append(f"nothing is known of what the head reads: {error.message}")
            return
        rows = batch.mask.reshape(-1).nonzero().squeeze(1).to(hidden.device)
        tokens = real_tokens(x, batch, rows)
        assert tokens is not None
        self._head.add(tokens)

    # --- writing ---

    def on_layer(self, number: int) -> None:
        """Write the layer after its last batch."""
        layer, self._layer = self._layer, _Layer()
        taps = self._stream.taps.layers[number]
        self._stream.weights.require_finite(linear_weights(taps))
        for tap in taps:
            if isinstance(tap, ExpertsTap):
                if tap.path in layer.routed:
                    self._write_experts(tap, layer.routed.pop(tap.path))
            elif layer.shares.get(tap.path) == tap.path:
                self._write_linear(tap, number, layer)
        for path in sorted(layer.unreadable):
            self.notices.append(
                f"{path} reads other than the text's tokens: nothing is known of its input"
            )

    def finish(self) -> None:
        """Write the head after the last layer."""
        head = self._stream.taps.head
        if head is not None and not self._headless:
            shapes = {placed.unit.key: placed.unit.shape for placed in self._units.linear(head)}
            self._write(shapes, self._head)

    def _write_linear(self, tap: LinearTap, number: int, layer: _Layer) -> None:
        if tap.path in layer.unreadable:
            return
        moment = layer.moments.pop(tap.path)
        shapes: Shapes = {}
        for other in self._stream.taps.layers[number]:
            if isinstance(other, LinearTap) and layer.shares.get(other.path) == tap.path:
                placed = self._units.linear(other)
                shapes.update({p.unit.key: p.unit.shape for p in placed})
                if not placed:
                    self.notices.append(
                        f"{other.weight} is stored in parts: nothing is known of its input"
                    )
        self._write(shapes, moment)

    def _write_experts(self, tap: ExpertsTap, routed: Routed) -> None:
        units = self._units.experts(tap)
        module = self._stream.model.get_submodule(tap.path)
        for expert, x in routed.by_expert():
            before = _shapes(units, expert, ("gate", "up", None))
            after = _shapes(units, expert, ("down",))
            view = ExpertView(module, expert)
            inputs, inner = self._form.new(), self._form.new()
            for part in torch.split(x, EXPERT_TOKENS):
                inputs.add(part)
                with torch.no_grad():
                    inner.add(view.mid(view.pre(part)))
            self._write(before, inputs)
            self._write(after, inner)
            if not inputs.tokens:
                self.unvisited += [*before, *after]

    def _write(self, shapes: Shapes, moment: TokenSum) -> None:
        moment.add_up()
        if not shapes or self._writer is None:
            return
        name, shape = next(iter(shapes.items()))
        mean = moment.mean()
        packed = None if mean is None else self._form.stored(mean)
        size = self._form.size(shape[-1])
        self._writer.add(name, [size], packed, units=shapes, tokens=moment.tokens)


def _shapes(
    units: Mapping[ExpertKey, Unit], expert: int, projections: tuple[str | None, ...]
) -> Shapes:
    projected = (units.get((expert, projection)) for projection in projections)
    return {unit.key: unit.shape for unit in projected if unit is not None}


def _chosen(call: Call) -> Tensor:
    """Return the experts of each token: (tokens, k)."""
    chosen: Tensor = call.argument(1, "top_k_index", "router_indices", "selected_experts")
    return chosen
