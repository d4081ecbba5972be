"""How much of each model a unit gets: its weight in the config, times the coefficient of a file."""

from __future__ import annotations

from moemerge.config.coefficients import KEY, WEIGHT, Coefficients, weighs
from moemerge.config.faults import Fault
from moemerge.config.parameter_values import ParameterReader, TensorContext
from moemerge.config.parameters import Scalar
from moemerge.errors import ConfigError

Values = dict[str, Scalar | None]


class Weighing:
    """Looks up each model's parameters, unit by unit, and notes which coefficients were used."""

    def __init__(self, coefficients: Coefficients | None) -> None:
        self._coefficients = coefficients
        self._used: set[tuple[str, str]] = set()

    def values(
        self, reader: ParameterReader, tensor: TensorContext, model: str, key: str
    ) -> tuple[Values, float]:
        """The parameters of a model for its unit `key`, and the scale of its change: a coefficient
        goes into the weight, or, where a method has none, into the scale."""
        if self._coefficients is None:
            return reader.values(tensor, model), 1.0
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
