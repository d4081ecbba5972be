"""Parameter values in mergekit's syntax, and the value that applies to a tensor of a model.

A value is
- a number, `true`/`false` (1 and 0), or one of a method's choices;
- a list of numbers: a gradient. With t in [0, 1] the depth in the slice and n values, the value at
  s = t (n - 1) is interpolated linearly between the neighbours of s;
- a list of `{filter, value}`: the first filter that matches decides; `*` or no filter matches all.
  If none matches, the next wider scope applies. A single `{filter, value}` counts as a list.

A filter is a plain substring of one of the tensor's names, or `role:NAME` with the tensor's role.

Scopes are searched in mergekit's order: for a per-model parameter the model, the slice, the module
and the top level; for a parameter of the whole method the slice, the module and the top level; then
the method's default.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moemerge.config.faults import Fault, FaultsError, Path, shown, suggested
from moemerge.config.parameters import REQUIRED, MethodSchema, ParameterSpec, Scalar
from moemerge.errors import ConfigError

ROLE_NAMES: Final = (
    "router",
    "router_bias",
    "selection_bias",
    "expert",
    "shared_expert",
    "mlp",
    "attention",
    "norm",
    "embedding",
    "head",
    "other",
)
ROLE_PREFIX: Final = "role:"
EVERYTHING: Final = "*"


@dataclass(frozen=True)
class TensorContext:
    """What a parameter's value depends on besides the model."""

    slice_index: int
    names: Sequence[str]  # that filters see
    role: str | None = None
    t: float = 0.0  # depth in the slice, for gradients


@dataclass(frozen=True)
class Gradient:
    """Values spread evenly over the layers of a slice."""

    points: tuple[float, ...]

    def at(self, t: float) -> float:
        position = t * (len(self.points) - 1)
        low = min(max(math.floor(position), 0), len(self.points) - 1)
        high = min(low + 1, len(self.points) - 1)
        fraction = position - low
        return (1 - fraction) * self.points[low] + fraction * self.points[high]


@dataclass(frozen=True)
class Branch:
    """One `{filter, value}`; `filter` None matches everything."""

    filter: str | None
    value: Scalar | Gradient

    def matches(self, tensor: TensorContext) -> bool:
        if self.filter is None:
            return True
        if self.filter.startswith(ROLE_PREFIX):
            return tensor.role == self.filter[len(ROLE_PREFIX) :]
        return any(self.filter in name for name in tensor.names)


@dataclass(frozen=True)
class Conditional:
    """A list of filters; the first match decides."""

    branches: tuple[Branch, ...]

    def choose(self, tensor: TensorContext) -> int | None:
        """Return the index of the first branch that matches."""
        return next((i for i, b in enumerate(self.branches) if b.matches(tensor)), None)


ParameterValue = Scalar | Gradient | Conditional


def leaves(value: ParameterValue) -> Iterator[tuple[Path, Scalar]]:
    """Return every scalar inside a value, with its path."""
    if isinstance(value, Conditional):
        for i, branch in enumerate(value.branches):
            for path, leaf in leaves(branch.value):
                yield (i, "value", *path), leaf
    elif isinstance(value, Gradient):
        for i, point in enumerate(value.points):
            yield (i,), point
    else:
        yield (), value


def plain(value: ParameterValue) -> Any:
    """Return the value as YAML data, which `parse_value` reads."""
    if isinstance(value, Conditional):
        return [
            {"value": plain(b.value)} if b.filter is None
            else {"filter": b.filter, "value": plain(b.value)}
            for b in value.branches
        ]  # fmt: skip
    return list(value.points) if isinstance(value, Gradient) else value


def parse_value(raw: object) -> ParameterValue:
    """Read a parameter's value; raises `FaultsError` with every fault in it."""
    if isinstance(raw, (Gradient, Conditional)):
        return raw
    if isinstance(raw, Mapping):
        return _conditional([raw], bare=True)
    if not isinstance(raw, (list, tuple)):
        return _scalar(raw)
    if not raw:
        raise FaultsError.one("an empty list has no value")
    if any(isinstance(item, Mapping) for item in raw):
        return _conditional(raw)
    return _gradient(raw)


def _scalar(raw: object) -> Scalar:
    if isinstance(raw, str) or (isinstance(raw, (int, float)) and _finite(raw)):
        return raw
    if isinstance(raw, (int, float)):
        raise FaultsError.one(f"expected a finite number, not {shown(raw)}")
    raise FaultsError.one(
        f"expected a number, a list of numbers or a list of {{filter, value}}, not {shown(raw)}"
    )


def _finite(number: float) -> bool:
    """Return whether the value is finite. Integers too large for a float are not."""
    return abs(number) <= sys.float_info.max


def _gradient(raw: Sequence[object]) -> Gradient:
    faults = []
    points = []
    for i, item in enumerate(raw):
        if isinstance(item, (int, float)) and _finite(item):
            points.append(float(item))
        else:
            faults.append(Fault((i,), f"a gradient is a list of numbers, not {shown(item)}"))
    if faults:
        raise FaultsError(faults)
    return Gradient(tuple(points))


def _conditional(raw: Sequence[object], *, bare: bool = False) -> Conditional:
    faults: list[Fault] = []
    branches: list[Branch] = []
    for i, item in enumerate(raw):
        here: Path = () if bare else (i,)
        if branches and branches[-1].filter is None:
            faults.append(
                Fault(here, "never used: the entry before it matches everything", ignorable=True)
            )
            continue
        try:
            branches.append(_branch(item))
        except FaultsError as error:
            faults.extend(p.under(here) for p in error.faults)
    if faults:
        raise FaultsError(faults)
    return Conditional(tuple(branches))


def _branch(raw: object) -> Branch:
    if not isinstance(raw, Mapping):
        raise FaultsError.one(f"expected {{filter, value}} like the other entries, not {raw!r}")
    keys = ("filter", "value")
    unknown = [key for key in raw if key not in keys]
    if unknown:
        texts = {key: f"unknown key{suggested(str(key), keys, 'known here')}" for key in unknown}
        raise FaultsError([Fault((key,), text, True) for key, text in texts.items()])
    if raw.get("value") is None:
        raise FaultsError.one("needs a `value`")
    pattern = _filter(raw.get("filter"))
    try:
        value = parse_value(raw["value"])
    except FaultsError as error:
        raise FaultsError([p.under(("value",)) for p in error.faults]) from None
    if isinstance(value, Conditional):
        raise FaultsError.one("filters cannot be nested: give a number or a gradient", "value")
    return Branch(pattern, value)


def _filter(raw: object) -> str | None:
    if raw is None or raw in (EVERYTHING, ""):
        return None
    if not isinstance(raw, str):
        raise FaultsError.one(f"a filter is text, not {raw!r}: put it in quotes", "filter")
    if raw.startswith(ROLE_PREFIX):
        role = raw[len(ROLE_PREFIX) :]
        if role not in ROLE_NAMES:
            close = suggested(role, ROLE_NAMES, "known here")
            raise FaultsError.one(f"unknown role {role!r}{close}", "filter")
    return raw


# --- the value for one tensor ---------------------------------------------------------------------

Values = Mapping[str, ParameterValue]


@dataclass(frozen=True)
class Scopes:
    """The mappings in which parameters are written, from narrow to wide."""

    models: tuple[Mapping[str, Values], ...]  # slice -> model's name -> its parameters
    slices: tuple[Values, ...]
    outer: tuple[Values, ...]  # the module, if any, then the top level


class ParameterReader:
    """Looks up the parameters of one method; scopes are chained once per slice and model.

    `override` comes before every other scope: the parameters of a config's `router:` section.
    There, per-model parameters still fall back to the models' own. Parameters of the whole method
    do not: at the top they belong to another method.
    """

    def __init__(
        self, schema: MethodSchema, scopes: Scopes, *, override: Values | None = None
    ) -> None:
        self.schema = schema
        self._scopes = scopes
        self._override = override
        self._chains: dict[tuple[int, str | None, str], tuple[ParameterValue, ...]] = {}
        self._unfiltered: dict[tuple[int, str | None, float], dict[str, Scalar | None]] = {}
        # The branches that decided, of every list of filters that was evaluated (by its id).
        self.decided: dict[int, set[int]] = {}

    @property
    def has_filters(self) -> bool:
        """Return whether a value depends on a tensor's name or role."""
        scopes = [*self._scopes.slices, *self._scopes.outer, self._override or {}]
        scopes += [values for models in self._scopes.models for values in models.values()]
        return any(isinstance(v, Conditional) for scope in scopes for v in scope.values())

    def values(
        self,
        tensor: TensorContext,
        model: str | None = None,
        fallback: Mapping[str, Scalar] | None = None,
    ) -> Mapping[str, Scalar | None]:
        """Return all per-model parameters of a model for one tensor, by their YAML names.

        Without a model, return all parameters of the whole method. `fallback` replaces a missing
        default.
        """
        key = (tensor.slice_index, model, tensor.t)
        if fallback is None and key in self._unfiltered:
            return self._unfiltered[key]
        wanted = [p for p in self.schema.parameters if p.per_model == (model is not None)]
        last = fallback or {}
        values = {p.name: self.value(p, tensor, model, last.get(p.name)) for p in wanted}
        chains = (self._chains[tensor.slice_index, model, p.name] for p in wanted)
        if fallback is None and not any(isinstance(v, Conditional) for c in chains for v in c):
            self._unfiltered[key] = values  # the same for every tensor
        return values

    def value(
        self,
        spec: ParameterSpec,
        tensor: TensorContext,
        model: str | None = None,
        fallback: Scalar | None = None,
    ) -> Scalar | None:
        """Return one parameter; None only if its default is None."""
        key = (tensor.slice_index, model, spec.name)
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains.setdefault(key, self._chain(*key, per_model=spec.per_model))
        for value in chain:
            chosen = self._branch(value, tensor) if isinstance(value, Conditional) else value
            if chosen is not None:
                return spec.convert(chosen.at(tensor.t) if isinstance(chosen, Gradient) else chosen)
        if spec.default is REQUIRED and fallback is not None:
            return fallback
        if spec.default is REQUIRED:
            raise _unset(spec, tensor.names, model)
        return spec.default

    def _branch(self, value: Conditional, tensor: TensorContext) -> Scalar | Gradient | None:
        number = value.choose(tensor)
        decided = self.decided.setdefault(id(value), set())
        if number is None:
            return None
        decided.add(number)
        return value.branches[number].value

    def is_set(self, slice_index: int, model: str | None, spec: ParameterSpec) -> bool:
        """Return whether any scope sets the parameter, even if only for some tensors."""
        return bool(self._chain(slice_index, model, spec.name, per_model=spec.per_model))

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
        "no filter matches it, and the parameter has no default",
        hint=f"add a catch-all as the last entry of {spec.name}: `- value: ...`",
    )
