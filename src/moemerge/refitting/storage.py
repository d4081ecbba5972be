"""Round new weights to the quantised format of the model, before the next map is fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moemerge.architectures.roles import Unit
from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.quantised.tensor import QuantisedInfo, Rounding
from moemerge.checkpoint.requantise import round_trip
from moemerge.features.input_hooks import ExpertsHook, LinearHook, UnitMap, projections
from moemerge.refitting.least_squares import Quantise
from moemerge.runtime.gpu import to_host

# A unit, and its part of the matrix in memory as a view.
Part = tuple[Unit, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Storage:
    """The format that new weights are stored in; without `same`, nothing is quantised."""

    checkpoint: Checkpoint
    units: UnitMap
    same: bool

    def linear(self, hook: LinearHook) -> Quantise | None:
        return self._quantise([(one.unit, one.take) for one in self.units.linear(hook)])

    def experts(
        self, hook: ExpertsHook, module: Any, which: str
    ) -> Callable[[int], Quantise | None]:
        """Return how the projection `up` (with gate) or `down` of an expert is quantised."""
        units = self.units.experts(hook)
        takes: dict[str | None, Callable[[Tensor], Tensor]] = {"down": _whole}
        if which == "up":
            takes = {None: _whole, **{name: _projection(module, name) for name in ("gate", "up")}}

        def of(expert: int) -> Quantise | None:
            found = [(units.get((expert, name)), take) for name, take in takes.items()]
            return self._quantise([(unit, take) for unit, take in found if unit is not None])

        return of

    def _quantise(self, parts: Sequence[Part]) -> Quantise | None:
        """Return None if a part is not quantised, or shares blocks of scales with other maps.

        Such tensors are rounded when they are written.
        """
        infos = [self.checkpoint.tensors[unit.tensor] for unit, _ in parts]
        if not self.same or not parts:
            return None
        for (unit, _), info in zip(parts, infos, strict=True):
            rows = unit.slot.rows or (0, info.rows)
            if not isinstance(info, QuantisedInfo) or not info.holds_whole(rows):
                return None

        def quantise(weight: Tensor) -> tuple[Tensor, str, Rounding]:
            matrix, rounding = to_host(weight).clone(), Rounding()
            blocks: dict[tuple[str, int], Tensor] = {}
            for unit, take in parts:
                place = _place(unit)
                if place not in blocks:  # values of other units in these rows stay
                    blocks[place] = self.checkpoint.read(unit.tensor, unit.slot.rows)
                unit.slot.take(blocks[place]).copy_(take(matrix))
            for (name, row), block in blocks.items():
                info = self.checkpoint.tensors[name]
                assert isinstance(info, QuantisedInfo)
                blocks[name, row] = round_trip(info, self.checkpoint, block, row, rounding)
            for unit, take in parts:
                take(matrix).copy_(unit.slot.take(blocks[_place(unit)]))
            return matrix.to(weight.device), infos[0].stored_as, rounding

        return quantise


def _place(unit: Unit) -> tuple[str, int]:
    return unit.tensor, 0 if unit.slot.rows is None else unit.slot.rows[0]


def _whole(matrix: Tensor) -> Tensor:
    return matrix


def _projection(module: Any, name: str) -> Callable[[Tensor], Tensor]:
    return lambda matrix: projections(module, matrix)[name]
