"""The contract of a merge method, and the list of those that exist.

A method is a function of tensors and numbers::

    @merge_method("mine", base=BasePolicy.REQUIRED, per_model=Weighted, options=MyOptions)
    def mine(inputs, base, options, unit):
        '''One line that `moemerge ls methods` shows.'''
        return base + sum(i.params.weight * (i.tensor - base) for i in inputs)

`inputs` come in the config's order, in float32 (or wider), as (out, in) where they are matrices;
the result has their shape. Parameters are frozen dataclasses whose fields are made by `param`.
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

from moemerge.architectures.roles import Role
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
from moemerge.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class NoParams:
    """A method without parameters of this kind."""


@dataclass(frozen=True)
class UnitStatistics:
    """What a model's own text says about one unit, for methods that ask for `statistics`."""

    # gram: (in, in), mean of x xᵀ; fisher: as the unit, mean squared gradients; activation: (in,),
    # mean |x|.
    values: Tensor
    tokens: int  # that passed through the unit
    domain_tokens: int  # of the model's text in all
    sequences: int  # of the model's text that a mean over sequences is over


@dataclass(frozen=True)
class ModelTensor:
    """One model's tensor with the parameters that the config gives it for this unit."""

    tensor: Tensor
    params: Any  # an instance of the method's `per_model` dataclass
    name: str = ""
    statistics: UnitStatistics | None = None  # None: the method wants none, or the unit has none


class StoppedError(Exception):
    """The merge was stopped elsewhere; ends a method's loop early. Never reaches a user."""


class Remark(StrEnum):
    """What a method may say of a single unit, as the report sorts it."""

    AVERAGED = "averaged"
    FEW_TOKENS = "few_tokens"
    NEAR_BASE = "near_base"
    UNVISITED = "unvisited"
    JITTER = "jitter"


Facts = Mapping[str, float | int | str]


def _never() -> bool:
    return False


def _ignore(remark: Remark, facts: Facts) -> None:
    pass


@dataclass(frozen=True)
class UnitInfo:
    """What a method may know of the thing it merges."""

    key: str
    role: Role
    seed: int = 0
    stopped: Callable[[], bool] = _never
    remark: Callable[[Remark, Facts], None] = _ignore  # tell the report something of this unit

    def check_stopped(self) -> None:
        """To be called now and then by a method that takes long, so that Ctrl-C is not in vain."""
        if self.stopped():
            raise StoppedError

    def stream(self, *salt: object) -> int:
        """A 63-bit seed that depends on this unit and `salt` alone: not on order, sharding,
        thread or device."""
        text = "\x1f".join([str(self.seed), self.key, *map(str, salt)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


AnyBase = TypeVar("AnyBase")

MergeFunction = Callable[[Sequence[ModelTensor], "Tensor | None", Any, UnitInfo], "Tensor"]
# Of each model's parameters, the options and the unit: how much of each model.
WeightsFunction = Callable[[Sequence[Any], Any, UnitInfo], Sequence[float]]


@dataclass(frozen=True)
class MergeMethod:
    """A registered method: its function, and what the planner and the config reader must know."""

    schema: MethodSchema
    function: MergeFunction
    per_model: type
    options: type
    elementwise: bool  # acts on every element alone: may run on stacks and on pieces of a tensor
    weights: WeightsFunction | None = None  # the w_i; of an elementwise method, which is Σ w_i θ_i

    @property
    def name(self) -> str:
        return self.schema.name

    def base_of(self, options: Any, base: AnyBase | None) -> AnyBase | None:
        """The base where its weights count. One that lends its config alone is used where the
        options say, in `needs_base`, which of them needs it."""
        if self.schema.base is not BasePolicy.DONOR:
            return base
        why = getattr(options, "needs_base", None)
        if why is not None and base is None:
            raise ConfigError(f"merge method {self.name!r} needs a base_model for {why}")
        return None if why is None else base

    def apply(
        self, inputs: Sequence[ModelTensor], base: Tensor | None, options: Any, unit: UnitInfo
    ) -> Tensor:
        """The function's result. What somebody else's function does wrong is told as its fault."""
        if self.function.__module__.startswith("moemerge."):
            return self.function(inputs, base, options, unit)
        try:
            result = self.function(inputs, base, options, unit)
            shape = inputs[0].tensor.shape
            if result.shape != shape:
                raise ValueError(f"the result is {[*result.shape]}, the models' {[*shape]}")
        except (MoeMergeError, StoppedError, MemoryError):
            raise
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's: told by who chose the device
                raise
            raise UsageError(
                f"merge method {self.name!r}, {unit.key}: {in_one_line(error)}",
                hint=f"repair the plugin {self.function.__module__!r}, which brings it",
            ) from error
        return result


METHODS: Registry[MergeMethod] = Registry("merge method")
PLUGINS = "moemerge.methods"  # the entry point of packages that bring methods along


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
    """A dataclass field that is a parameter; `key` is its YAML name where Python's differs."""
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
) -> Callable[[MergeFunction], MergeFunction]:
    """Register a merge method under `name`, as it is written in a config.

    It takes at least and at most so many `models`, the base not counted where it stands apart.
    With `statistics`, each input carries its model's statistics of the unit, where it has any.
    `weights` says how much each model counts, and refuses weights that cannot be; where the method
    is also `elementwise`, it is this weighted sum, which can then be taken without calling it.
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
            time=getattr(function, _TIME, "passes"),
        )
        method = MergeMethod(schema, function, per_model, options, elementwise, weights)
        METHODS.add(name, method)
        return function

    return register


_TIME = "moemerge_time"


def takes(time: MethodTime) -> Callable[[MergeFunction], MergeFunction]:
    """Say, below `merge_method`, what a method takes longest for, where it is not passes over the
    weights: `moemerge ls methods` tells."""

    def mark(function: MergeFunction) -> MergeFunction:
        setattr(function, _TIME, time)
        return function

    return mark


def yaml_key(f: Any) -> str:
    """The YAML name of a parameter field."""
    return str(f.metadata["key"] or f.name)


def parameter_specs(cls: type, *, per_model: bool) -> list[ParameterSpec]:
    """What the fields of a parameter dataclass declare."""
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
    """Import every module that a package registers under the entry point, once; their names."""
    plugins = entry_points(group=PLUGINS)
    for entry in plugins:
        try:
            entry.load()
        except (Exception, SystemExit) as error:  # whatever somebody's package does
            raise UsageError(
                f"the plugin {entry.name!r} ({entry.value}) cannot be imported: "
                f"{in_one_line(error)}",
                hint="repair or uninstall the package that brings it",
            ) from error
    return tuple(entry.name for entry in plugins)
