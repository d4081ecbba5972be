"""Activations of the layer that ran last, token by token, and the drift of its hidden states.

The drift is the distance of hidden states from the sources', for the refitted model and for the
merge. For the merge, a few batches run twice: when a layer is in memory and none of its maps has
changed yet, it is called again on the merge's hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moemerge.errors import ArchitectureError
from moemerge.forward.stops import Call, Rerun
from moemerge.forward.tokens import real_tokens
from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch

BatchId = int  # id of a batch: models that run side by side share their batches


@dataclass
class Record:
    """Activations of one batch in one layer: rows of real tokens, by module path."""

    entered: Tensor | None = None  # the hidden state before the layer, (tokens, d)
    left: Tensor | None = None  # and after it
    inputs: dict[str, Tensor] = field(default_factory=dict)  # (tokens, in); shared where they are
    outputs: dict[str, Tensor] = field(default_factory=dict)  # (tokens, out)
    order: list[str] = field(default_factory=list)  # paths as they were called


@dataclass
class LayerRecorder:
    """Records activations of the calls that a stream reports.

    `inputs` and `outputs` choose modules by path. They are evaluated for every batch, so the first
    batch of a layer can reduce what later ones record.
    """

    layers: Collection[str]
    inputs: Callable[[str], bool]
    outputs: Callable[[str], bool]
    copies: bool  # activations of a waiting batch may be offloaded, so they are copied
    records: dict[BatchId, Record] = field(default_factory=dict)
    on_batch: Callable[[Batch, Record], None] | None = None  # a batch has passed a layer

    def begin(self) -> None:
        """Drop the records of the previous layer."""
        self.records = {}

    def on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        calls = [call for call in calls if call.out is not None]
        if not calls:
            return
        record = self.records.setdefault(id(batch), Record())
        known: dict[int, Tensor] = {}  # tensors that several modules read are stored once
        for call in calls:
            if call.path in self.layers:
                if record.entered is None:
                    record.entered = self._tokens(_first(call), batch, rows, known)
                record.left = self._tokens(_output(call), batch, rows, known)
                continue
            record.order.append(call.path)
            if self.inputs(call.path):
                tokens = self._tokens(_first(call), batch, rows, known)
                if tokens is not None:
                    record.inputs[call.path] = tokens
            if self.outputs(call.path):
                tokens = self._tokens(_output(call), batch, rows, known)
                if tokens is not None:
                    record.outputs[call.path] = tokens
        if record.left is not None and self.on_batch is not None:
            self.on_batch(batch, record)

    def _tokens(
        self, value: Any, batch: Batch, rows: Tensor | None, known: dict[int, Tensor]
    ) -> Tensor | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in known:
            tokens = real_tokens(value, batch, rows)
            if tokens is None or tokens.shape[0] != batch.tokens:
                return None
            again = self.copies and rows is None
            known[id(value)] = tokens.detach().clone() if again else tokens.detach()
        return known[id(value)]


def _first(call: Call) -> Any:
    return next(iter((*call.args, *call.kwargs.values())), None)


def _output(call: Call) -> Any:
    return call.out[0] if isinstance(call.out, tuple) else call.out


# --- drift --------------------------------------------------------------------------------------


@dataclass
class LayerCalls:
    """The arguments with which every batch entered the current layer."""

    layers: Collection[str]  # by path
    _calls: dict[BatchId, tuple[Rerun, Tensor, Tensor | None]] = field(default_factory=dict)

    def on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        for call in calls:
            if call.path in self.layers and call.out is None:
                rerun = call.rerun()
                if rerun is None:
                    raise ArchitectureError(
                        f"{call.path} is called without hidden states",
                        hint='use `solver="closed-form"`',
                    )
                self._calls[id(batch)] = (rerun[1], rerun[0].detach(), rows)

    def of(self, batch: Batch) -> tuple[Rerun, Tensor, Tensor | None]:
        """Return how to call the layer again, its hidden states, and the rows of real tokens."""
        return self._calls[id(batch)]


@dataclass
class AsMerged:
    """The hidden states of the merge, layer by layer."""

    layers: Collection[str]  # by path
    batches: Collection[BatchId]  # those that are followed
    copies: bool  # activations of a waiting batch may be offloaded
    working: bool = True  # until a layer cannot be called again
    _calls: dict[BatchId, Rerun] = field(default_factory=dict)
    _hidden: dict[BatchId, Tensor] = field(default_factory=dict)

    def on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        """Keep the arguments of a layer that a batch has entered."""
        if not self.working or self.copies or id(batch) not in self.batches:
            return
        for call in calls:
            if call.path not in self.layers or call.out is not None:
                continue
            rerun = call.rerun()
            if rerun is None:
                self.working = False
                return
            hidden, again = rerun
            self._calls[id(batch)] = again
            self._hidden.setdefault(id(batch), hidden.detach())

    def run(self, layer: nn.Module) -> None:
        """Call the layer in memory, with merged weights, on every followed batch."""
        calls, self._calls = self._calls, {}
        for key, again in calls.items():
            try:
                with torch.no_grad():
                    out = again(layer, self._hidden[key])
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
                self.working = False  # layers exchange more than hidden states
                return
            out = out[0] if isinstance(out, tuple) else out
            if not isinstance(out, Tensor) or out.shape != self._hidden[key].shape:
                self.working = False
                return
            self._hidden[key] = out.detach()

    def states(self, batch: Batch, rows: Tensor | None) -> Tensor | None:
        """Return the states after the layer that ran last, (tokens, d)."""
        hidden = self._hidden.get(id(batch)) if self.working else None
        return None if hidden is None else real_tokens(hidden, batch, rows)


def followed_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Return the held-out batches; if there are none, the first of every domain."""
    held = [batch for batch in batches if batch.holdout]
    return held or list({batch.domain: batch for batch in reversed(batches)}.values())


def layer_drift(
    batches: Sequence[Batch],
    states: Callable[[Batch], Tensor | None],
    source: Callable[[Batch], Record],
    ranks: Ranks,
) -> dict[str, float]:
    """Return ‖h − h_source‖ / ‖h_source‖ after the last layer by domain; {} if a rank lacks it."""
    sums: dict[str, list[float]] = {}
    known = True
    for batch in batches:
        mine, theirs = states(batch), source(batch).left
        if mine is None or theirs is None or mine.shape != theirs.shape:
            known = False
            break
        own = sums.setdefault(batch.domain, [0.0, 0.0])
        own[0] += float((mine.double() - theirs.double()).square().sum())
        own[1] += float(theirs.double().square().sum())
    if not ranks.all_agree(known):
        return {}
    parts = ranks.gather(sums)
    drift = {}
    for domain in sums:
        gap, size = (sum(part[domain][at] for part in parts if domain in part) for at in (0, 1))
        drift[domain] = math.sqrt(gap / size) if size > 0.0 else 0.0
    return drift
