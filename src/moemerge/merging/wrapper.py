"""The interface of a wrapper, which acts around any merge method, unit by unit.

    @merge_wrapper("halved", options=MyOptions)
    def halved(inner, inputs, base, options, unit):
        '''One line that `moemerge ls wrappers` shows.'''
        return base.tensor + 0.5 * (inner(inputs, base.tensor) - base.tensor)

`inner` is the method, or the method inside the wrappers that the config lists before this one. A
wrapper may change the inputs or the result. There is always a base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moemerge.config.parameters import StatisticsKind, WrapperSchema
from moemerge.errors import UsageError
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, parameter_specs
from moemerge.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Inner = Callable[[Sequence[ModelTensor], "Tensor"], "Tensor"]
WrapperFunction = Callable[[Inner, Sequence[ModelTensor], ModelTensor, Any, UnitInfo], "Tensor"]


@dataclass(frozen=True)
class MergeWrapper:
    """A registered wrapper: its function and its declaration."""

    schema: WrapperSchema
    function: WrapperFunction
    options: type


@dataclass(frozen=True)
class Wrap:
    """A wrapper and its options for one unit."""

    wrapper: MergeWrapper
    options: Any


WRAPPERS: Registry[MergeWrapper] = Registry("wrapper")


def merge_wrapper(
    name: str,
    *,
    options: type = NoParams,
    statistics: StatisticsKind | None = None,
    turns: bool = False,
) -> Callable[[WrapperFunction], WrapperFunction]:
    """Register a wrapper under the `name` that a config's `wrap:` uses.

    With `statistics`, the base carries its statistics of the unit if there are any. `turns` means
    that the method sees the models' changes in other coordinates than the weights'.
    """

    def register(function: WrapperFunction) -> WrapperFunction:
        summary = (function.__doc__ or "").strip().split("\n")[0]
        if not summary:
            raise UsageError(f"wrapper {name!r} needs a docstring: its first line is shown")
        specs = tuple(parameter_specs(options, per_model=False))
        schema = WrapperSchema.of(name, summary, specs, statistics, turns=turns)
        WRAPPERS.add(name, MergeWrapper(schema, function, options))
        return function

    return register


BaseAs = Callable[["StatisticsKind | None"], ModelTensor]


def around(inner: Inner, wraps: Sequence[Wrap], base_as: BaseAs, unit: UnitInfo) -> Inner:
    """Return `inner` inside the wrappers. The first wrapper is the innermost.

    `base_as` returns the base with its statistics of a kind.
    """
    call = inner
    for wrap in wraps:
        call = _wrapped(wrap, call, base_as, unit)
    return call


def _wrapped(wrap: Wrap, inner: Inner, base_as: BaseAs, unit: UnitInfo) -> Inner:
    def call(inputs: Sequence[ModelTensor], base: Tensor) -> Tensor:
        known = base_as(wrap.wrapper.schema.statistics)
        # An outer wrapper may have changed the base's coordinates.
        mine = ModelTensor(base, known.params, known.name, known.statistics)
        return wrap.wrapper.function(inner, inputs, mine, wrap.options, unit)

    return call
