"""What a map is missing, token by token: the target minus what it gives now.

Most maps are to give what the source's map gives on the source's own input. A map that writes to
the hidden state is to bring it to where the source's is: so each layer also undoes what those
before it left over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moemerge.refitting.domains import Affine
from moemerge.refitting.records import Key, Record
from moemerge.refitting.rounding import GATED_ROUNDINGS, OWN_ROUNDINGS, unit
from moemerge.refitting.writes import ResidualWrite
from moemerge.text.batches import Batch


@dataclass
class LayerView:
    """One model in one layer: its modules, and what each batch read and gave there so far."""

    model: nn.Module
    records: Mapping[Key, Record]

    def record(self, batch: Batch) -> Record:
        return self.records[id(batch)]


@dataclass(frozen=True)
class HiddenState:
    """The hidden state at a point inside a layer: h + Σ a_j o_j over the writes so far."""

    writes: Sequence[ResidualWrite]  # all of the layer, in order
    leaders: Mapping[str, str]  # a gate's path -> a module that reads the same input before it

    def after(self, view: LayerView, batch: Batch, count: int, rows: slice) -> Tensor:
        """After the first `count` writes, (tokens, d) in float32 at least; to be read only."""
        record = view.record(batch)
        if count == len(self.writes) and record.left is not None:
            return _wide(record.left[rows])
        assert record.entered is not None
        state = _wide(record.entered[rows]).clone()
        for write in self.writes[:count]:
            said = _wide(record.outputs[write.path][rows])
            state += self.coefficient(view, batch, write, rows) * said
        return state

    def rounding(
        self, view: LayerView, batch: Batch, place: int, rows: slice, says: Tensor
    ) -> Tensor:
        """How far apart sums alone may put a source's state after write `place` and this model's,
        whose write `says` (tokens, d) what it adds. What they are of: see `rounding`."""
        record = view.record(batch)
        assert record.entered is not None
        state = _wide(record.entered[rows]).clone()
        sums, products = state.abs(), torch.zeros_like(state)
        for write in self.writes[:place]:
            said = self.coefficient(view, batch, write, rows) * _wide(
                record.outputs[write.path][rows]
            )
            state += said
            sums += state.abs()
            products += said.abs() * roundings_of(write)
        sums += (state + says).abs()
        own = 2.0 * unit(state.dtype) * sums
        if place + 1 < len(self.writes):
            return own  # summed here, not by the model
        products += says.abs() * roundings_of(self.writes[place])
        return own.add_(sums.add_(products), alpha=unit(record.entered.dtype))

    def coefficient(
        self, view: LayerView, batch: Batch, write: ResidualWrite, rows: slice
    ) -> Tensor | float:
        """a_j of every token: a number, or (tokens, 1)."""
        if write.gate is None:
            return write.factor
        x = view.record(batch).inputs[self.leaders[write.gate]][rows]
        gate = Affine.of(view.model, f"{write.gate}.weight").widened()
        return write.factor * torch.sigmoid(gate(x))


def roundings_of(write: ResidualWrite) -> float:
    """Of what a module adds to the hidden state, before it is added."""
    return OWN_ROUNDINGS if write.gate is None else GATED_ROUNDINGS


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
