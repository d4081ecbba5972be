"""What a model read and gave in the layer it has just run, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moemerge.features.stops import Call
from moemerge.features.tokens import real_tokens
from moemerge.text.batches import Batch

Key = int  # id of a batch: models that run side by side share their batches


@dataclass
class Record:
    """One batch in one layer: rows of real tokens, by module path."""

    entered: Tensor | None = None  # the hidden state before the layer, (tokens, d)
    left: Tensor | None = None  # and after it
    inputs: dict[str, Tensor] = field(default_factory=dict)  # (tokens, in); shared where they are
    outputs: dict[str, Tensor] = field(default_factory=dict)  # (tokens, out)
    order: list[str] = field(default_factory=list)  # paths as they were called


@dataclass
class LayerRecorder:
    """Keeps what is `wanted` of the calls that a stream tells of.

    `inputs` and `outputs` name the modules whose inputs and outputs are kept; they may be asked
    for again for every batch, so the first batch of a layer can teach what the others need.
    """

    layers: Collection[str]
    inputs: Callable[[str], bool]
    outputs: Callable[[str], bool]
    copies: bool  # what a waiting batch holds may be taken away from it meanwhile
    records: dict[Key, Record] = field(default_factory=dict)
    on_batch: Callable[[Batch, Record], None] | None = None  # a batch has passed a layer

    def begin(self) -> None:
        """Forget the layer before."""
        self.records = {}

    def on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        calls = [call for call in calls if call.out is not None]
        if not calls:
            return
        record = self.records.setdefault(id(batch), Record())
        known: dict[int, Tensor] = {}  # tensors that several modules read are kept once
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
