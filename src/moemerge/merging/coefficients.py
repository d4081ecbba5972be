"""Each model's weight in a unit: the config's weight times the coefficient of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moemerge.config.coefficients import (
    KEY,
    LETTERS,
    NEURONS,
    WEIGHT,
    Coefficients,
    weighs,
)
from moemerge.config.faults import Fault
from moemerge.config.parameter_values import ParameterReader, TensorContext
from moemerge.config.parameters import Scalar
from moemerge.errors import ConfigError
from moemerge.families.layout import projection_of
from moemerge.families.roles import Role, Unit
from moemerge.merging.plan import NeuronScale
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

UnitParameters = Mapping[str, Scalar | None]


class Weighing:
    """Looks up each model's parameters, unit by unit, and tracks which coefficients are used."""

    def __init__(self, coefficients: Coefficients) -> None:
        self._coefficients = coefficients
        self._used: set[tuple[str, str]] = set()

    def values(
        self, reader: ParameterReader, tensor: TensorContext, model: str, unit: Unit
    ) -> tuple[UnitParameters, float | NeuronScale]:
        """Return a model's parameters for one unit, and the scale of its change.

        A coefficient multiplies the weight or, if the method has none, the scale. Coefficients of
        single neurons are always a scale.
        """
        neurons = self._neurons(model, unit)
        if neurons is not None:
            given = {WEIGHT: 1.0} if weighs(reader.schema) else {}
            return reader.values(tensor, model, given), neurons
        return self._whole(reader, tensor, model, unit.key)

    def _whole(
        self, reader: ParameterReader, tensor: TensorContext, model: str, key: str
    ) -> tuple[UnitParameters, float]:
        place = self._coefficients.place(model, key)
        if place is None:
            raise ConfigError(
                f"{self._coefficients.document.where}: no coefficient of {model!r} fits {key}",
                hint='give one for all other places: `"*": 1.0`',
            )
        self._used.add((model, place))
        coefficient = self._coefficients.values[model][place]
        if not weighs(reader.schema):
            return reader.values(tensor, model), coefficient
        values = reader.values(tensor, model, {WEIGHT: 1.0})
        weight = values[WEIGHT]
        assert isinstance(weight, int | float)
        product = self._checked(reader, float(weight) * coefficient, (model, place))
        return {**values, WEIGHT: product}, 1.0

    def _neurons(self, model: str, unit: Unit) -> NeuronScale | None:
        """Return the scale of a unit with labelled neurons, or None."""
        groups, projection = self._coefficients.neurons, projection_of(unit)
        place = unit.key.rpartition(".")[0].rpartition(".")[0]  # without down_proj.weight
        if groups is None or place not in groups.labels:
            return None
        if projection is None:
            if unit.role in (Role.MLP, Role.SHARED_EXPERT) and len(unit.shape) == 2:
                text = f"has no neurons to scale: {unit.key} is neither gate, up nor down"
                self._coefficients.document.judge([Fault((NEURONS, "labels", place), text)])
            return None
        axis = len(unit.shape) - 1 if projection == "down" else 0
        if projection == "down" and len(unit.shape) < 2:
            return None  # the output bias has no neuron axis
        self._used.add((model, place))
        labels = groups.labels[place]
        if len(labels) != unit.shape[axis]:
            text = f"{len(labels)} letters, but {unit.key} has {unit.shape[axis]} neurons"
            self._coefficients.document.judge([Fault((NEURONS, "labels", place), text)])
        return NeuronScale(labels, self._coefficients.neuron_shares(model), axis)

    def _checked(self, reader: ParameterReader, weight: float, place: tuple[str, str]) -> float:
        spec = next(spec for spec in reader.schema.parameters if spec.name == WEIGHT)
        text = spec.fault(weight)
        if text is not None:
            fault = Fault((KEY, *place), f"of {reader.schema.name!r}, times its weight: {text}")
            self._coefficients.document.judge([fault])
        return weight

    def check_all_used(self) -> None:
        """Refuse places that match no unit. Call it after all units were looked up."""
        self._coefficients.document.judge(self._coefficients.idle(self._used))


def neuron_shares(scale: NeuronScale, tensor: Tensor) -> Tensor:
    """Return each neuron's factor, in a shape that broadcasts with the unit."""
    letters = torch.frombuffer(bytearray(scale.labels, "ascii"), dtype=torch.uint8).long()
    table = tensor.new_zeros(128)
    for letter, share in zip(LETTERS, scale.shares, strict=False):
        table[ord(letter)] = share
    shape = [1] * tensor.dim()
    shape[scale.axis] = -1
    return table[letters.to(table.device)].view(shape)
