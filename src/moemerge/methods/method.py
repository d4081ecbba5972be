"""The interface of a merge method, and the registry of methods.

A method is a function of tensors and numbers::

    @merge_method("mine", base=BasePolicy.REQUIRED, per_model=Weighted, options=MyOptions)
    def mine(inputs, base, options, unit):
        '''One line that `moemerge ls methods` shows.'''
        return base + sum(i.params.weight * (i.tensor - base) for i in inputs)

`inputs` are in the config's order and in float32 (or wider). Matrices have the layout (out, in).
The result has their shape. Parameters are frozen dataclasses with fields made by `param`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from importlib.metadata import entry_points
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from moemerge.config.parameters import (
    REQUIRED,
    MethodSchema,
    MethodTime,
    ParameterSpec,
    Required,
    Scalar,
    StatisticsKind,
)
from moemerge.config.parameters import BasePolicy as BasePolicy  # methods take it from here
from moemerge.errors import ConfigError, MoeMergeError, UsageError, in_one_line
from moemerge.families.roles import Role
from moemerge.registry import Registry
from moemerge.runtime.devices import is_out_of_memory
from moemerge.statistics.file import UnitStatistics as UnitStatistics

if TYPE_CHECKING:
    from torch import Tensor

    from moemerge.methods._sparsify import Sparsified


@dataclass(frozen=True)
class NoParams:
    """Parameters of a method that has none."""


@dataclass(frozen=True)
class ModelTensor:
    """One model's tensor with its parameters for this unit."""

    tensor: Tensor
    params: Any  # an instance of the method's `per_model` dataclass
    name: str = ""
    statistics: UnitStatistics | None = None  # None: the method or the unit has none


class StoppedError(Exception):
    """Ends a method's loop after another thread stopped the merge. Never reaches a user."""


class Remark(StrEnum):
    """Kinds of remark that a method can make about one unit; the report groups by kind."""

    AVERAGED = "averaged"
    FEW_TOKENS = "few_tokens"
    NEAR_BASE = "near_base"
    UNVISITED = "unvisited"
    JITTER = "jitter"


Facts = Mapping[str, float | int | str]


@dataclass(frozen=True)
class UnitInfo:
    """Metadata of the unit that a method merges."""

    key: str
    role: Role
    seed: int = 0
    stopped: Callable[[], bool] = lambda: False
    remark: Callable[[Remark, Facts], None] = lambda remark, facts: None  # adds to the report

    def check_stopped(self) -> None:
        """Raise if the merge was stopped. Slow methods call it regularly, so that Ctrl-C works."""
        if self.stopped():
            raise StoppedError

    def stream(self, *salt: object) -> int:
        """Return a 63-bit seed that depends on the run's seed, this unit and `salt` alone.

        Order, sharding, threads and device do not change it.
        """
        text = "\x1f".join([str(self.seed), self.key, *map(str, salt)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


AnyBase = TypeVar("AnyBase")

# The base is a Tensor if the method requires one, else `Tensor | None`.
MergeFunction = Callable[[Sequence[ModelTensor], Any, Any, UnitInfo], "Tensor"]
# (each model's parameters, options, unit) -> each model's weight
WeightsFunction = Callable[[Sequence[Any], Any, UnitInfo], Sequence[float]]


@dataclass(frozen=True)
class MergeMethod:
    """A registered method: its function and its declaration."""

    schema: MethodSchema
    function: MergeFunction
    per_model: type
    options: type
    elementwise: bool  # may run on stacks and on slices of a tensor
    weights: WeightsFunction | None = None  # refuses invalid ones
    in_runs: Sparsified | None = None  # for units that are too large for memory

    @property
    def name(self) -> str:
        return self.schema.name

    def base_of(self, options: Any, base: AnyBase | None) -> AnyBase | None:
        """Return the base if the method uses its weights, else None.

        A method whose base only provides the config may have an option that needs the weights.
        `needs_base` of the options then names that option.
        """
        if self.schema.base is not BasePolicy.DONOR:
            return base
        why = getattr(options, "needs_base", None)
        if why is not None and base is None:
            raise ConfigError(f"merge method {self.name!r} needs a base_model for {why}")
        return None if why is None else base

    def apply(
        self, inputs: Sequence[ModelTensor], base: Tensor | None, options: Any, unit: UnitInfo
    ) -> Tensor:
        """Return the function's result. Errors of a plugin's function name the plugin."""
        if self.function.__module__.startswith("moemerge."):
            return self.function(inputs, base, options, unit)
        try:
            result = self.function(inputs, base, options, unit)
            shape = inputs[0].tensor.shape
            if result.shape != shape:
                raise ValueError(f"the result is {[*result.shape]}, the models' {[*shape]}")
        except (MoeMergeError, StoppedError):
            raise
        except Exception as error:
            if is_out_of_memory(error):  # `execute` reports it
                raise
            raise UsageError(
                f"merge method {self.name!r}, {unit.key}: {in_one_line(error)}",
                hint=f"repair the plugin {self.function.__module__!r}, which provides it",
            ) from error
        return result


METHODS: Registry[MergeMethod] = Registry("merge method")
PLUGINS = "moemerge.methods"  # entry point group of packages that provide methods


def param(
    default: Scalar | Required | None = REQUIRED,
    *,
    help: str,
    key: str | None = None,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    exclusive_minimum: bool = False,
    exclusive_maximum: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field for a parameter. `key` is its YAML name if it is not the field's."""
    metadata = {
        "help": help,
        "key": key,
        "minimum": minimum,
        "maximum": maximum,
        "exclusive_minimum": exclusive_minimum,
        "exclusive_maximum": exclusive_maximum,
        "choices": choices,
    }
    if default is REQUIRED:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def merge_method(
    name: str,
    *,
    base: BasePolicy,
    per_model: type = NoParams,
    options: type = NoParams,
    models: tuple[int, int | None] = (1, None),
    elementwise: bool = False,
    statistics: StatisticsKind | None = None,
    weights: WeightsFunction | None = None,
    time: MethodTime = "passes",
    in_runs: Sparsified | None = None,
) -> Callable[[MergeFunction], MergeFunction]:
    """Register a merge method under the `name` that configs use.

    `models` is the minimum and maximum number of inputs, without a separate base.
    With `statistics`, each input carries its model's statistics of the unit if there are any.
    `weights` returns each model's weight and refuses invalid ones. `time` is what dominates the run
    time; `moemerge ls methods` lists it. `in_runs` merges units that are too large for memory, with
    the same result.
    """

    if elementwise and statistics is not None:
        raise UsageError(
            f"merge method {name!r} cannot be elementwise and use statistics",
            hint="statistics belong to whole units: leave `elementwise` out",
        )

    def register(function: MergeFunction) -> MergeFunction:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        if not summary:
            raise UsageError(f"merge method {name!r} needs a docstring: its first line is shown")
        schema = MethodSchema(
            name=name,
            summary=summary,
            base=base,
            min_models=models[0],
            max_models=models[1],
            parameters=(
                *parameter_specs(per_model, per_model=True),
                *parameter_specs(options, per_model=False),
            ),
            statistics=statistics,
            time=time,
        )
        method = MergeMethod(schema, function, per_model, options, elementwise, weights, in_runs)
        METHODS.add(name, method)
        return function

    return register


def yaml_key(f: Any) -> str:
    """Return the YAML name of a parameter field."""
    return str(f.metadata["key"] or f.name)


def parameter_specs(cls: type, *, per_model: bool) -> list[ParameterSpec]:
    """Return the specification of each field of a parameter dataclass."""
    hints = get_type_hints(cls)
    specs = []
    for f in fields(cls):
        metadata = dict(f.metadata)
        key = yaml_key(f)
        del metadata["key"]
        hint = hints[f.name]
        choices = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = [t for t in choices if t is not type(None)]
        if len(kinds) != 1 or kinds[0] not in (float, int, bool, str):
            raise UsageError(
                f"parameter {key!r} of {cls.__name__} has type {hints[f.name]}",
                hint="use float, int, bool or str, optionally with `| None`",
            )
        default = REQUIRED if f.default is MISSING else f.default
        specs.append(
            ParameterSpec(name=key, type=kinds[0], default=default, per_model=per_model, **metadata)
        )
    return specs


@functools.cache
def load_plugins() -> tuple[str, ...]:
    """Import every plugin registered under the entry point, once. Return their names."""
    plugins = entry_points(group=PLUGINS)
    for entry in plugins:
        try:
            entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin may raise anything
            raise UsageError(
                f"the plugin {entry.name!r} ({entry.value}) cannot be imported: "
                f"{in_one_line(error)}",
                hint="repair or uninstall the package that provides it",
            ) from error
    return tuple(entry.name for entry in plugins)
