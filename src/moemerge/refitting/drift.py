"""How far the hidden states are from the sources': of the refitted model, and of the merge before.

The merge as it was is run beside the refit on a few batches: when a layer has come into memory and
none of its maps has moved yet, it is called once more on the hidden states of the merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moemerge.features.stops import Call
from moemerge.features.tokens import real_tokens
from moemerge.refitting.records import Key, Record
from moemerge.runtime import ranks
from moemerge.text.batches import Batch

Again = Callable[[nn.Module, Tensor], Any]  # calls a layer again, on other hidden states


@dataclass
class AsMerged:
    """The hidden states of the merge as it was, layer by layer."""

    layers: Collection[str]  # by path
    batches: Collection[Key]  # those that are followed
    copies: bool  # what a waiting batch holds may be taken away from it
    working: bool = True  # until a layer cannot be called again
    _calls: dict[Key, tuple[Again, Tensor | None]] = field(default_factory=dict)
    _hidden: dict[Key, Tensor] = field(default_factory=dict)

    def on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        """A batch has entered a layer: keep how it was called."""
        if not self.working or self.copies or id(batch) not in self.batches:
            return
        for call in calls:
            if call.path not in self.layers or call.out is not None:
                continue
            rerun = _again(call)
            if rerun is None:
                self.working = False
                return
            hidden, again = rerun
            self._calls[id(batch)] = (again, rows)
            self._hidden.setdefault(id(batch), hidden.detach())

    def run(self, layer: nn.Module) -> None:
        """Call the layer that is in memory, as merged, on every followed batch."""
        calls, self._calls = self._calls, {}
        for key, (again, _) in calls.items():
            try:
                with torch.no_grad():
                    out = again(layer, self._hidden[key])
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
                self.working = False  # it is handed more than hidden states from layer to layer
                return
            out = out[0] if isinstance(out, tuple) else out
            if not isinstance(out, Tensor) or out.shape != self._hidden[key].shape:
                self.working = False
                return
            self._hidden[key] = out.detach()

    def states(self, batch: Batch, rows: Tensor | None) -> Tensor | None:
        """After the layer that ran last, (tokens, d)."""
        hidden = self._hidden.get(id(batch)) if self.working else None
        return None if hidden is None else real_tokens(hidden, batch, rows)


def _again(call: Call) -> tuple[Tensor, Again] | None:
    if call.args and isinstance(call.args[0], Tensor):
        rest, kwargs = call.args[1:], call.kwargs
        return call.args[0], lambda layer, x: layer(x, *rest, **kwargs)
    name = "hidden_states"
    if not isinstance(call.kwargs.get(name), Tensor):
        return None
    others = {key: value for key, value in call.kwargs.items() if key != name}
    return call.kwargs[name], lambda layer, x: layer(hidden_states=x, **others)


@dataclass
class Drift:
    """‖h − h_source‖ / ‖h_source‖ over the tokens of every domain."""

    _sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, domain: str, states: Tensor, wanted: Tensor) -> None:
        own = self._sums.setdefault(domain, [0.0, 0.0])
        own[0] += float((states.double() - wanted.double()).square().sum())
        own[1] += float(wanted.double().square().sum())

    def add_up(self) -> None:
        """Over all ranks."""
        parts = ranks.gathered(self._sums)
        self._sums = {
            domain: [sum(part[domain][at] for part in parts if domain in part) for at in (0, 1)]
            for domain in self._sums
        }

    def by_domain(self) -> dict[str, float]:
        return {
            domain: math.sqrt(gap / size) if size > 0.0 else 0.0
            for domain, (gap, size) in self._sums.items()
        }


def followed_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Held-out batches; without any, the first of every domain."""
    held = [batch for batch in batches if batch.holdout]
    return held or list({batch.domain: batch for batch in reversed(batches)}.values())


def layer_drift(
    batches: Sequence[Batch],
    states: Callable[[Batch], Tensor | None],
    source: Callable[[Batch], Record],
) -> dict[str, float]:
    """Of one model after the layer that ran last; empty where it is not known, in some rank."""
    drift, known = Drift(), True
    for batch in batches:
        mine, theirs = states(batch), source(batch).left
        if mine is None or theirs is None or mine.shape != theirs.shape:
            known = False
            break
        drift.add(batch.domain, mine, theirs)
    if not ranks.all_say(known):
        return {}
    drift.add_up()
    return drift.by_domain()
