"""Collect statistics of the inputs of linear maps: Gram matrices or mean sizes.

Dense inputs are summed batch by batch. Inputs of experts are stored until the layer is finished and
then summed expert by expert, so that only one expert's matrix is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moemerge.config.parameters import StatisticsKind
from moemerge.errors import ArchitectureError
from moemerge.families.roles import Unit
from moemerge.forward.input_hooks import (
    ExpertsHook,
    ExpertView,
    LinearHook,
    UnitMap,
    head_input,
    linear_weights,
)
from moemerge.forward.stops import Call
from moemerge.forward.stream import ModelStream
from moemerge.forward.tokens import real_rows, real_tokens
from moemerge.runtime.ranks import Ranks
from moemerge.statistics import StatisticsWriter
from moemerge.statistics.collecting.maths import (
    Routed,
    TokenSum,
    gram_sum,
    magnitude_sum,
    power_sum,
)
from moemerge.statistics.file import pack_symmetric, stored_shape
from moemerge.text.batches import Batch

# Tokens of one expert that are processed at once.
EXPERT_TOKENS = 16384


@dataclass
class _Layer:
    """The inputs recorded in the current layer."""

    moments: dict[str, TokenSum] = field(default_factory=dict)  # by the path that came first
    shares: dict[str, str] = field(default_factory=dict)  # path -> the path whose input it shares
    routed: dict[str, Routed] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {  # of inputs, over tokens
    "gram": gram_sum,
    "activation": magnitude_sum,
    "power": power_sum,
}


class InputCollector:
    """Records the inputs of a stream and writes Gram matrices or mean sizes."""

    def __init__(self, writer: StatisticsWriter | None, kind: StatisticsKind, ranks: Ranks) -> None:
        """`writer` is rank 0's: other ranks only add to the sums."""
        self._writer = writer
        self._ranks = ranks
        self._kind: StatisticsKind = kind
        self._layer = _Layer()
        self._head = self._new_sum()
        self._headless = False
        self.unvisited: list[str] = []  # units of experts that no token was routed to
        self.notices: list[str] = []

    def _new_sum(self) -> TokenSum:
        return TokenSum(SUMS[self._kind], self._ranks)

    def attach(self, stream: ModelStream, units: UnitMap) -> None:
        """Start recording."""
        self._stream = stream
        self._units = units
        self._hooks = {hook.path: hook for hooks in stream.input_hooks.layers for hook in hooks}
        stream.listen(self._hooks, self.on_calls)
        if stream.input_hooks.notice:
            self.notices.append(stream.input_hooks.notice)

    # --- recording ---

    def on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        """Record the inputs of one batch in one layer."""
        last: tuple[str, Any] = ("", None)  # path and input of the last call
        for call in calls:
            hook = self._hooks[call.path]
            x = call.argument(0, "hidden_states", "input", "x")
            if isinstance(hook, ExpertsHook):
                chosen = call.argument(1, "top_k_index", "router_indices", "selected_experts")
                self._keep(hook, x, chosen, batch, rows)  # (tokens, k)
                continue
            leader = self._layer.shares.setdefault(
                hook.path, last[0] if x is last[1] else hook.path
            )
            if leader == hook.path:
                tokens = real_tokens(x, batch, rows)
                if tokens is None:
                    self._layer.unreadable.add(hook.path)
                else:
                    moment = self._layer.moments.setdefault(hook.path, self._new_sum())
                    moment.add(tokens.detach())
                last = (hook.path, x)

    def _keep(
        self, hook: ExpertsHook, x: Tensor, chosen: Tensor, batch: Batch, rows: Tensor | None
    ) -> None:
        tokens, places = real_tokens(x, batch, rows), real_tokens(chosen, batch, rows)
        if tokens is None or places is None:
            raise ArchitectureError(f"{hook.path} is not given all tokens of a batch")
        if rows is None:  # otherwise it is already a copy
            tokens, places = tokens.clone(), places.clone()
        self._layer.routed.setdefault(hook.path, Routed(hook.count)).add(tokens, places)

    def on_output(self, batch: Batch, hidden: Tensor) -> None:
        """Record the final hidden states, the head's inputs."""
        head = self._stream.input_hooks.head
        if head is None or self._headless:
            return
        try:
            x = head_input(self._stream.model, self._stream.anatomy.owner, head, hidden)
        except ArchitectureError as error:
            self._headless = True
            self.notices.append(f"nothing is known of what the head reads: {error.message}")
            return
        tokens = real_tokens(x, batch, real_rows(batch, hidden.device))
        assert tokens is not None
        self._head.add(tokens)

    # --- writing ---

    def on_layer(self, number: int) -> None:
        """Write the layer after its last batch."""
        layer, self._layer = self._layer, _Layer()
        hooks = self._stream.input_hooks.layers[number]
        self._stream.weights.require_finite(linear_weights(hooks))
        for hook in hooks:
            if isinstance(hook, ExpertsHook):
                if hook.path in layer.routed:
                    self._write_experts(hook, layer.routed.pop(hook.path))
            elif layer.shares.get(hook.path) == hook.path:
                self._write_linear(hook, number, layer)
        for path in sorted(layer.unreadable):
            self.notices.append(
                f"{path} gets inputs that are not the text's tokens: it has no statistics"
            )

    def finish(self) -> None:
        """Write the head after the last layer."""
        head = self._stream.input_hooks.head
        if head is not None and not self._headless:
            self._write([placed.unit for placed in self._units.linear(head)], self._head)

    def _write_linear(self, hook: LinearHook, number: int, layer: _Layer) -> None:
        if hook.path in layer.unreadable:
            return
        moment = layer.moments.pop(hook.path)
        units: list[Unit] = []
        for other in self._stream.input_hooks.layers[number]:
            if isinstance(other, LinearHook) and layer.shares.get(other.path) == hook.path:
                placed = self._units.linear(other)
                units += [p.unit for p in placed]
                if not placed:
                    self.notices.append(
                        f"{other.weight} is stored in parts: nothing is known of its input"
                    )
        self._write(units, moment)

    def _write_experts(self, hook: ExpertsHook, routed: Routed) -> None:
        units = self._units.experts(hook)
        module = self._stream.model.get_submodule(hook.path)
        for expert, x in routed.by_expert():
            before, after = (
                [units[expert, p] for p in projections if (expert, p) in units]
                for projections in (("gate", "up", None), ("down",))
            )
            view = ExpertView(module, expert)
            inputs, inner = self._new_sum(), self._new_sum()
            for part in torch.split(x, EXPERT_TOKENS):
                inputs.add(part)
                with torch.no_grad():
                    inner.add(view.mid(view.pre(part)))
            self._write(before, inputs)
            self._write(after, inner)
            if not inputs.tokens:
                self.unvisited += [unit.key for unit in (*before, *after)]

    def _write(self, units: Sequence[Unit], moment: TokenSum) -> None:
        """Write the mean once, under the name of the first of the units with this input."""
        moment.add_up()
        if not units or self._writer is None:
            return
        shapes = {unit.key: unit.shape for unit in units}
        mean = moment.mean()
        if mean is not None and self._kind == "gram":
            mean = pack_symmetric(mean)
        stored = stored_shape(self._kind, units[0].shape)
        self._writer.add(units[0].key, stored, mean, units=shapes, tokens=moment.tokens)
