"""From a matrix in memory to the units that it is stored as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from moemerge.architectures.architecture import Architecture
from moemerge.architectures.roles import Role, Unit
from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.features.loading import NameMap, Recipe
from moemerge.features.taps import ExpertsTap, LinearTap, Taps


@dataclass(frozen=True)
class PlacedUnit:
    """A unit and where it begins in the matrix in memory."""

    unit: Unit
    start: int

    def take(self, values: Tensor) -> Tensor:
        """The unit's part of a tensor like the matrix in memory, as (out, in)."""
        slot = self.unit.slot
        first, stop = slot.rows or (0, self.unit.shape[0])
        return slot.take(values[self.start + first : self.start + stop])


ExpertKey = tuple[int, str | None]  # (expert, projection); None: gate and up in one unit


class UnitMap:
    """The units of one checkpoint behind the parameters of its model."""

    def __init__(self, checkpoint: Checkpoint, architecture: Architecture, names: NameMap) -> None:
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._names = names

    def linear(self, tap: LinearTap) -> tuple[PlacedUnit, ...]:
        """Units that read the input of a linear map; none where they are stored in another way."""
        recipe = self._names.recipes.get(tap.weight)
        if recipe is None or not _joins_rows(recipe):
            return ()
        placed: list[PlacedUnit] = []
        start = 0
        for _, name in recipe.sources:
            shape = self._checkpoint.tensors[name].shape
            if len(shape) != 2 or shape[1] != tap.shape[1]:
                return ()
            units = self._architecture.units(name)
            placed += [PlacedUnit(u, start) for u in units if u.shape[1:] == (tap.shape[1],)]
            start += shape[0]
        return tuple(placed) if start == tap.shape[0] else ()

    def stored_as(self, parameter: str) -> str | None:
        """The stored tensor that a parameter is, where it is exactly one, unchanged."""
        return self._names.on_disk(parameter)

    def experts(self, tap: ExpertsTap) -> Mapping[ExpertKey, Unit]:
        """Every expert's projections."""
        experts: dict[ExpertKey, Unit] = {}
        for parameter in (tap.up, tap.down):
            recipe = self._names.recipes.get(parameter)
            for _, name in () if recipe is None else recipe.sources:
                for unit in self._architecture.units(name):
                    if unit.expert is not None and len(unit.shape) == 2:
                        experts[unit.expert, unit.projection] = unit
        return experts

    def require_experts(self, taps: Taps) -> None:
        """Refuse a model with experts that none of the taps reads: most of it would be missing."""
        for parameter in taps.untapped:
            recipe = self._names.recipes.get(parameter)
            for _, name in () if recipe is None else recipe.sources:
                for unit in self._architecture.units(name):
                    if unit.role is Role.EXPERT and len(unit.shape) == 2:
                        raise ArchitectureError(
                            f"{self._checkpoint.label}: {parameter} holds experts of "
                            f"{self._architecture.model_type} in a form whose inputs cannot be "
                            "told expert by expert, so there are no statistics of them",
                            hint="merge this family with a method that needs no statistics",
                        )


def _joins_rows(recipe: Recipe) -> bool:
    """Whether the parameter is a stored tensor, or several below each other."""
    if recipe.converter is None:
        return True
    plan = [(type(op).__name__, getattr(op, "dim", None)) for op in recipe.converter.operations]
    return plan == [("Concatenate", 0)] and len(recipe.converter.target_patterns) == 1
