"""The value of a parameter for one tensor of one model, by mergekit's order of scopes.

A per-model parameter is looked for under the model, then the slice, then the module and the top; a
parameter of the whole method under the slice, the module and the top; then the method's default. A
scope whose filters all pass a tensor by is passed by as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moemerge.config.parameters import REQUIRED, MethodSchema, ParameterSpec, Scalar
from moemerge.config.values import Conditional, Gradient, ParameterValue, evaluate
from moemerge.errors import ConfigError

Values = Mapping[str, ParameterValue]


@dataclass(frozen=True)
class Scopes:
    """Where parameters are written, from the narrow to the wide."""

    models: tuple[Mapping[str, Values], ...]  # slice -> model's name -> what stands under it
    slices: tuple[Values, ...]
    outer: tuple[Values, ...]  # module (where there is one), then the top


class ParameterReader:
    """Looks parameters of one method up; the chain of scopes is found once per slice and model.

    `override` comes before every other scope: the parameters of a config's `router:` section.
    There, per-model parameters still fall through to what the models say (how much of each), but
    those of the whole method do not: at the top they belong to another method.
    """

    def __init__(
        self, schema: MethodSchema, scopes: Scopes, *, override: Values | None = None
    ) -> None:
        self.schema = schema
        self._scopes = scopes
        self._override = override
        self._chains: dict[tuple[int, str | None, str], tuple[ParameterValue, ...]] = {}

    def value(
        self,
        slice_index: int,
        model: str | None,
        spec: ParameterSpec,
        names: Sequence[str],
        role: str | None,
        t: float,
    ) -> Scalar | None:
        """`names` are those of the tensor that filters see; `model` is None for parameters of the
        whole method. None is a value only where the default is None."""
        key = (slice_index, model, spec.name)
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains.setdefault(key, self._chain(*key, per_model=spec.per_model))
        for value in chain:
            found = evaluate(value, names, role, t)
            if found is not None:
                return spec.convert(found)
        if spec.default is REQUIRED:
            raise _unset(spec, names, model)
        return spec.default

    def model_values(
        self, slice_index: int, model: str, names: Sequence[str], role: str | None, t: float
    ) -> dict[str, Scalar | None]:
        """All per-model parameters of one model for one tensor, by their YAML names."""
        return {
            spec.name: self.value(slice_index, model, spec, names, role, t)
            for spec in self.schema.parameters
            if spec.per_model
        }

    def method_values(
        self, slice_index: int, names: Sequence[str], role: str | None, t: float
    ) -> dict[str, Scalar | None]:
        """All parameters of the whole method for one tensor, by their YAML names."""
        return {
            spec.name: self.value(slice_index, None, spec, names, role, t)
            for spec in self.schema.parameters
            if not spec.per_model
        }

    def is_set(self, slice_index: int, model: str | None, spec: ParameterSpec) -> bool:
        """Whether any scope gives the parameter, if only for some tensors."""
        return bool(self._chain(slice_index, model, spec.name, per_model=spec.per_model))

    def varies(self, slice_index: int, model: str | None, spec: ParameterSpec) -> bool:
        """Whether the value can differ between tensors (filters, gradients)."""
        chain = self._chain(slice_index, model, spec.name, per_model=spec.per_model)
        return bool(chain) and isinstance(chain[0], (Gradient, Conditional))

    def _chain(
        self, slice_index: int, model: str | None, name: str, *, per_model: bool
    ) -> tuple[ParameterValue, ...]:
        scopes: list[Values] = [] if self._override is None else [self._override]
        if per_model and model is not None:
            scopes.append(self._scopes.models[slice_index].get(model, {}))
        if per_model or self._override is None:
            scopes += [self._scopes.slices[slice_index], *self._scopes.outer]
        return tuple(scope[name] for scope in scopes if name in scope)


def _unset(spec: ParameterSpec, names: Sequence[str], model: str | None) -> ConfigError:
    of_model = f" of model {model!r}" if model is not None else ""
    return ConfigError(
        f"no value of parameter {spec.name!r} applies to tensor {names[0]!r}{of_model}: "
        "every filter passes it by, and the parameter has no default",
        hint=f"add a catch-all as the last entry of {spec.name}: `- value: ...`",
    )
