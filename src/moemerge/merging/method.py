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

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_type_hints

from torch import Tensor

from moemerge.architectures.roles import Role
from moemerge.config.parameters import (
    REQUIRED,
    BasePolicy,
    MethodSchema,
    ParameterSpec,
    Required,
    Scalar,
)
from moemerge.errors import UsageError
from moemerge.registry import Registry


@dataclass(frozen=True)
class NoParams:
    """A method without parameters of this kind."""


@dataclass(frozen=True)
class ModelTensor:
    """One model's tensor with the parameters that the config gives it for this unit."""

    tensor: Tensor
    params: Any  # an instance of the method's `per_model` dataclass


class StoppedError(Exception):
    """The merge was stopped elsewhere; ends a method's loop early. Never reaches a user."""


def _go_on() -> bool:
    return False


@dataclass(frozen=True)
class UnitInfo:
    """What a method may know of the thing it merges."""

    key: str
    role: Role
    seed: int = 0
    stopped: Callable[[], bool] = _go_on

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


MergeFunction = Callable[[Sequence[ModelTensor], Tensor | None, Any, UnitInfo], Tensor]


@dataclass(frozen=True)
class MergeMethod:
    """A registered method: its function, and what the planner and the config reader must know."""

    schema: MethodSchema
    function: MergeFunction
    per_model: type
    options: type
    elementwise: bool  # acts on every element alone: may run on stacks and on pieces of a tensor

    @property
    def name(self) -> str:
        return self.schema.name


METHODS: Registry[MergeMethod] = Registry("merge method")


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
    min_models: int = 1,
    max_models: int | None = None,
    elementwise: bool = False,
) -> Callable[[MergeFunction], MergeFunction]:
    """Register a merge method under `name`, as it is written in a config."""

    def register(function: MergeFunction) -> MergeFunction:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        if not summary:
            raise UsageError(f"merge method {name!r} needs a docstring: its first line is shown")
        schema = MethodSchema(
            name=name,
            summary=summary,
            base=base,
            min_models=min_models,
            max_models=max_models,
            parameters=(*_specs(per_model, per_model=True), *_specs(options, per_model=False)),
        )
        METHODS.add(name, MergeMethod(schema, function, per_model, options, elementwise))
        return function

    return register


def yaml_key(f: Any) -> str:
    """The YAML name of a parameter field."""
    return str(f.metadata["key"] or f.name)


def _specs(cls: type, *, per_model: bool) -> list[ParameterSpec]:
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
