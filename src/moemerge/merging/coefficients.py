"""How much of each model a unit gets: its weight in the config, times the coefficient of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moemerge.architectures.layout import projection_of
from moemerge.architectures.roles import Role, Unit
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
from moemerge.merging.plan import NeuronScale
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Values = dict[str, Scalar | None]


class Weighing:
    """Looks up each model's parameters, unit by unit, and notes which coefficients were used."""

    def __init__(self, coefficients: Coefficients | None) -> None:
        self._coefficients = coefficients
        self._used: set[tuple[str, str]] = set()

    def values(
        self, reader: ParameterReader, tensor: TensorContext, model: str, unit: Unit
    ) -> tuple[Values, float | NeuronScale]:
        """The parameters of a model for one of its units, and the scale of its change: a
        coefficient goes into the weight, or, where a method has none, into the scale. Those of
        single neurons are always a scale."""
        if self._coefficients is None:
            return reader.values(tensor, model), 1.0
        neurons = self._neurons(model, unit)
        if neurons is not None:
            given = {WEIGHT: 1.0} if weighs(reader.schema) else {}
            return reader.values(tensor, model, given), neurons
        return self._whole(reader, tensor, model, unit.key)

    def _whole(
        self, reader: ParameterReader, tensor: TensorContext, model: str, key: str
    ) -> tuple[Values, float]:
        assert self._coefficients is not None
        place = self._coefficients.place(model, key)
        if place is None:
            raise ConfigError(
                f"{self._coefficients.file}: no coefficient of {model!r} fits {key}",
                hint='give one for all other places: `"*": 1.0`',
            )
        self._used.add((model, place))
        coefficient = self._coefficients.values[model][place]
        if not weighs(reader.schema):
            return reader.values(tensor, model), coefficient
        values = reader.values(tensor, model, {WEIGHT: 1.0})
        weight = values[WEIGHT]
        assert isinstance(weight, int | float)
        values[WEIGHT] = self._checked(reader, float(weight) * coefficient, (model, place))
        return values, 1.0

    def _neurons(self, model: str, unit: Unit) -> NeuronScale | None:
        """The scale of a unit whose MLP has labels; None where it has none, or no neurons."""
        assert self._coefficients is not None
        groups, projection = self._coefficients.neurons, projection_of(unit)
        place = unit.key.rpartition(".")[0].rpartition(".")[0]  # without down_proj.weight
        if groups is None or place not in groups.labels:
            return None
        if projection is None:
            if unit.role in (Role.MLP, Role.SHARED_EXPERT) and len(unit.shape) == 2:
                text = f"has no neurons to scale: {unit.key} is neither gate, up nor down"
                self._coefficients.judge([Fault((NEURONS, "labels", place), text)])
            return None
        axis = len(unit.shape) - 1 if projection == "down" else 0
        if projection == "down" and len(unit.shape) < 2:
            return None  # a bias of the outputs
        self._used.add((model, place))
        labels = groups.labels[place]
        if len(labels) != unit.shape[axis]:
            text = f"{len(labels)} letters, but {unit.key} has {unit.shape[axis]} neurons"
            self._coefficients.judge([Fault((NEURONS, "labels", place), text)])
        return NeuronScale(labels, self._coefficients.neuron_shares(model), axis)

    def _checked(self, reader: ParameterReader, weight: float, place: tuple[str, str]) -> float:
        assert self._coefficients is not None
        spec = next(spec for spec in reader.schema.parameters if spec.name == WEIGHT)
        text = spec.fault(weight)
        if text is not None:
            fault = Fault((KEY, *place), f"of {reader.schema.name!r}, times its weight: {text}")
            self._coefficients.judge([fault])
        return weight

    def check_all_used(self) -> None:
        """Refuse places that fit no unit; to be called once all units were asked for."""
        if self._coefficients is not None:
            self._coefficients.judge(list(self._coefficients.idle(self._used)))


def neuron_shares(scale: NeuronScale, tensor: Tensor) -> Tensor:
    """Each neuron's share, in a shape that goes with the unit's."""
    letters = torch.frombuffer(bytearray(scale.labels, "ascii"), dtype=torch.uint8).long()
    table = tensor.new_zeros(128)
    for letter, share in zip(LETTERS, scale.shares, strict=False):
        table[ord(letter)] = share
    shape = [1] * tensor.dim()
    shape[scale.axis] = -1
    return table[letters.to(table.device)].view(shape)
