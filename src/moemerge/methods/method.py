"""A merge method is a function of tensors. This module registers it and merges units with it.

    @merge_method("ties", base="required", sparsify=largest)
    def ties(deltas, weights: Weight, *, density: Density = 1.0, lambda_: Lambda = 1.0):
        '''One line that `moemerge ls methods` shows.'''
        return lambda_ * elected_sum(deltas, weights)

The function gets what its arguments name:

    tensors     the models' tensors in float32 or wider, as (out, in); not to be changed
    deltas      or their task vectors θ_i - θ_0, to which the base is added afterwards
    base        the base's tensor
    statistics  each model's statistics of the unit
    unit        the unit's key, role and models; a source of seeds; remarks for the report

All other arguments are parameters of the method. Their type hints and defaults are what a config is
checked against. `PerModel` ones are lists with one value for each model.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from moemerge.config.parameters import (
    REQUIRED,
    BasePolicy,
    MethodSchema,
    MethodTime,
    ParameterSpec,
    StatisticsKind,
)
from moemerge.errors import ConfigError, MoeMergeError, UsageError, in_one_line
from moemerge.families.roles import Role
from moemerge.methods._sparsify import Keep, TaskVector
from moemerge.methods._tensors import average, row_chunks, rows_and_columns, shares, weighted_sum
from moemerge.registry import Registry
from moemerge.runtime.devices import is_out_of_memory
from moemerge.runtime.lazy import torch
from moemerge.statistics.file import UnitStatistics as UnitStatistics

if TYPE_CHECKING:
    from torch import Tensor

# --- declarations of parameters -------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """The help text and limits of a parameter: `Annotated[float, Param("…", minimum=0)]`."""

    help: str = ""
    minimum: float = -math.inf
    maximum: float = math.inf
    above: float | None = None  # an exclusive minimum


T = TypeVar("T")
PerModel: TypeAlias = Any | Sequence[T]  # one value for each model; a default is that of all
Tensors: TypeAlias = Sequence["Tensor"]

Weight = Annotated[PerModel[float], Param("this model's share of the sum")]
ErrorWeight = Annotated[PerModel[float], Param("how much this model's errors count", minimum=0)]
Density = Annotated[
    PerModel[float],
    Param("fraction of the task vector's elements that is kept", minimum=0, maximum=1),
]
Lambda = Annotated[float, Param("factor on the merged task vector")]
Normalize = Annotated[bool, Param("divide by the sum of the weights")]
Ignored = Annotated[bool, Param("accepted for mergekit's configs; has no effect here")]

DATA = frozenset({"tensors", "deltas", "base", "statistics", "unit", "inner"})


def specifications(function: Callable[..., Any]) -> dict[str, ParameterSpec]:
    """Return the parameters of a function by argument. `lambda_` and `weights` lose their ends."""
    hints = get_type_hints(function, localns={"Tensor": Any}, include_extras=True)
    found = {}
    for name, argument in inspect.signature(function).parameters.items():
        if name in DATA:
            continue
        info, hint = Param(), hints.get(name)
        if get_origin(hint) is Annotated:
            hint, info = get_args(hint)[:2]
        several = [part for part in get_args(hint) if get_origin(part) is Sequence]
        if several:
            [hint] = get_args(several[0])
        union = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        [kind, *more] = [part for part in union if part is not NoneType]
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        if more or not (choices or kind in (float, int, bool, str)):
            raise UsageError(
                f"argument {name!r} of {function.__name__} has type {hints.get(name)}",
                hint="use float, int, bool, str or Literal, optionally with `| None`",
            )
        required = argument.default is inspect.Parameter.empty
        found[name] = ParameterSpec(
            name="weight" if name == "weights" else name.rstrip("_"),
            type=str if choices else kind,
            default=REQUIRED if required else argument.default,
            per_model=bool(several),
            help=info.help,
            minimum=info.minimum if info.above is None else info.above,
            maximum=info.maximum,
            exclusive_minimum=info.above is not None,
            choices=choices,
        )
    return found


def summary_of(function: Callable[..., Any], what: str) -> str:
    summary = (function.__doc__ or "").strip().split("\n")[0]
    if not summary:
        raise UsageError(f"{what} needs a docstring: its first line is shown")
    return summary


# --- the unit that is merged ----------------------------------------------------------------------


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
    models: tuple[str, ...] = ()  # their names, in order
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


# Matrices that are not linear layers: rows are looked up or scaled, not multiplied with inputs.
NOT_LINEAR = frozenset({Role.NORM, Role.EMBEDDING, Role.HEAD})


def is_linear(tensor: Tensor, unit: UnitInfo) -> bool:
    return tensor.dim() == 2 and tensor.numel() > 0 and unit.role not in NOT_LINEAR


def is_unchanged(tensor: Tensor, base: Tensor) -> bool:
    """Return whether the tensors are equal, or one is the other rounded to a narrower dtype.

    Experts that no token reached in fine-tuning keep the base's weights, up to rounding to the
    stored dtype. Methods that normalise would amplify this rounding error.
    """
    if torch.equal(tensor, base):
        return True
    for dtype in (torch.bfloat16, torch.float16):
        a, b = tensor.to(dtype), base.to(dtype)
        if torch.equal(a, b) and (
            torch.equal(a.to(tensor.dtype), tensor) or torch.equal(b.to(base.dtype), base)
        ):
            return True
    return False


# --- methods --------------------------------------------------------------------------------------

Arguments = Mapping[str, Any]
Blocks = Callable[[int], Iterator["Tensor"]]  # a model's task vector, some rows at a time


@dataclass(frozen=True)
class MergeMethod:
    """A registered method: its function and its declaration."""

    schema: MethodSchema
    function: Callable[..., Tensor]
    parameters: Mapping[str, ParameterSpec]  # by argument
    wants: Collection[str]  # which of `DATA` it gets
    elementwise: bool = False
    sparsify: Callable[..., Keep] | None = None
    linear_layers: bool = False
    base_if: tuple[str, str] | None = None
    check: Callable[..., object] | None = None

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def in_rows(self) -> bool:
        """Return whether some rows of a unit can be merged alone."""
        return self.elementwise or self.sparsify is not None

    def arguments(
        self, models: Sequence[Mapping[str, Any]], options: Mapping[str, Any], key: str
    ) -> Arguments:
        """Return the function's arguments from each model's and the common parameters in YAML.

        Raises `ConfigError` if they do not fit together.
        """
        found = arguments_of(self.parameters, models, options)
        if self.check is not None:
            try:
                self.check(**found)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error.message}", hint=error.hint) from None
        return found

    def base_of(self, arguments: Arguments, base: T | None) -> T | None:
        """Return the base if the method uses its weights, else None."""
        if self.schema.base is not BasePolicy.DONOR:
            return base
        if self.base_if is None or arguments[self.base_if[0]] != self.base_if[1]:
            return None
        if base is None:
            why = f"`{self.base_if[0]}: {self.base_if[1]}`"
            raise ConfigError(f"merge method {self.name!r} needs a base_model for {why}")
        return base

    def merge(
        self,
        tensors: Tensors,
        base: Tensor | None,
        arguments: Arguments,
        unit: UnitInfo,
        statistics: Sequence[UnitStatistics | None] = (),
    ) -> Tensor:
        """Merge a whole unit."""
        tensors = [tensor.contiguous() for tensor in tensors]
        base = None if base is None else base.contiguous()
        like = tensors[0] if base is None else base
        if not like.numel():
            return like.clone()
        if self.schema.statistics is not None and not _complete(statistics, unit):
            weights = arguments.get("weights")
            return weighted_sum(tensors, shares(weights)) if weights else average(tensors)
        if self.linear_layers:
            assert base is not None
            others, arguments = arguments["others"], {**arguments}
            del arguments["others"]
            if not is_linear(base, unit):
                return average(tensors) if others == "average" else base.clone()
            tensors = [tensor for tensor in tensors if not is_unchanged(tensor, base)]
            if not tensors:
                return base.clone()
        if self.in_rows:
            keeps: Sequence[Keep] = ()
            if self.sparsify is not None:
                assert base is not None
                blocks = _differences(tensors, base)
                keeps = self.survey(blocks, len(tensors), base.shape, arguments, unit)
            return self.merge_rows(tensors, base, arguments, unit, keeps)
        data = {"tensors": tensors, "base": base, "statistics": statistics, "unit": unit}
        if "deltas" in self.wants:
            assert base is not None
            data["deltas"] = [tensor - base for tensor in tensors]
        merged = self._call(data, arguments, like.shape, unit)
        if base is not None and "deltas" in self.wants:
            merged = base + merged
        return merged.to(like.dtype).contiguous()

    def merge_rows(
        self,
        tensors: Tensors,
        base: Tensor | None,
        arguments: Arguments,
        unit: UnitInfo,
        keeps: Sequence[Keep],
        first: int = 0,
    ) -> Tensor:
        """Merge some rows of a unit, of which `first` is the first. `keeps` are from `survey`."""
        like = tensors[0] if base is None else base
        rows, columns = rows_and_columns(like.shape)
        flats = [tensor.reshape(-1) for tensor in tensors]
        origin, out = like.reshape(-1), torch.empty(like.numel(), dtype=like.dtype).to(like.device)
        for at in row_chunks(rows, columns, like.device):
            data: dict[str, Any] = {"base": origin[at], "unit": unit}
            data["tensors"] = [flat[at] for flat in flats]
            if "deltas" in self.wants:
                data["deltas"] = [tensor - origin[at] for tensor in data["tensors"]]
            for keep, delta in zip(keeps, data.get("deltas", ()), strict=False):
                keep(delta.view(-1, columns), first + at.start // columns)
            merged = self._call(data, arguments, origin[at].shape, unit)
            if "deltas" in self.wants:
                torch.add(origin[at], merged, out=out[at])
            else:
                out[at] = merged
        return out.view(like.shape)

    def survey(
        self, blocks: Blocks, count: int, shape: Sequence[int], arguments: Arguments, unit: UnitInfo
    ) -> list[Keep]:
        """Return what to keep of each model's task vector, after passes over all its rows."""
        assert self.sparsify is not None
        wanted = list(inspect.signature(self.sparsify).parameters)[1:]
        restore = arguments.get("rescale") and arguments.get("rescale_norm", "l1") == "l1"
        keeps = []
        for i in range(count):
            own = {
                name: arguments[name][i] if self.parameters[name].per_model else arguments[name]
                for name in wanted
            }
            vector = TaskVector(
                tuple(shape),
                functools.partial(blocks, i),
                lambda salt, i=i: unit.stream(salt, i),  # type: ignore[misc]
            )
            keep = self.sparsify(vector, **own)
            keeps.append(_restoring_norm(vector, keep) if restore else keep)
        return keeps

    def _call(
        self, data: Mapping[str, Any], arguments: Arguments, shape: Sequence[int], unit: UnitInfo
    ) -> Tensor:
        """Return the function's result. Errors of a plugin's function name the plugin."""
        given = {**{name: data[name] for name in self.wants}, **arguments}
        if self.function.__module__.startswith("moemerge."):
            return self.function(**given)
        try:
            result = self.function(**given)
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


def arguments_of(
    parameters: Mapping[str, ParameterSpec],
    models: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a function's arguments by the names and values of each model and of all, in YAML."""

    def value(spec: ParameterSpec, given: Mapping[str, Any]) -> Any:
        return given.get(spec.name, None if spec.default is REQUIRED else spec.default)

    return {
        name: [value(spec, given) for given in models] if spec.per_model else value(spec, options)
        for name, spec in parameters.items()
    }


def _complete(statistics: Sequence[UnitStatistics | None], unit: UnitInfo) -> bool:
    """Return whether every model has statistics. There is a remark if only some have."""
    missing = [name for name, known in zip(unit.models, statistics, strict=False) if known is None]
    if statistics and None in statistics and any(statistics):
        unit.remark(Remark.AVERAGED, {"why": f"no statistics of {', '.join(missing)}"})
    return bool(statistics) and None not in statistics


def _differences(tensors: Tensors, base: Tensor) -> Blocks:
    """Return the task vectors of tensors in memory, chunk by chunk."""
    rows, columns = rows_and_columns(base.shape)
    origin = base.reshape(-1)

    def blocks(i: int) -> Iterator[Tensor]:
        flat = tensors[i].reshape(-1)
        for at in row_chunks(rows, columns, base.device):
            yield (flat[at] - origin[at]).view(-1, columns)

    return blocks


def _restoring_norm(vector: TaskVector, keep: Keep) -> Keep:
    """Return `keep`, followed by the factor that restores the whole vector's L1 norm."""
    before = after = 0.0
    first = 0
    for block in vector.blocks():
        before += float(block.abs().sum())
        keep(block, first)
        after += float(block.abs().sum())
        first += len(block)
    gain = before / after if after > 0 else 1.0

    def restore(rows: Tensor, first: int) -> None:
        keep(rows, first)
        rows.mul_(gain)

    return restore


# --- registration ---------------------------------------------------------------------------------

METHODS: Registry[MergeMethod] = Registry("merge method")
PLUGINS = "moemerge.methods"  # entry point group of packages that provide methods
Function = TypeVar("Function", bound=Callable[..., Any])
OTHERS = ParameterSpec(
    name="others",
    type=str,
    default="average",
    per_model=False,
    help="norms, embeddings, heads and biases: average of the models, or the base's own",
    choices=("average", "base"),
)


def merge_method(
    name: str,
    *,
    base: Literal["required", "optional", "member", "donor"],
    models: tuple[int, int | None] = (1, None),
    elementwise: bool = False,
    sparsify: Callable[..., Keep] | None = None,
    linear_layers: bool = False,
    statistics: StatisticsKind | None = None,
    base_if: tuple[str, str] | None = None,
    check: Callable[..., object] | None = None,
    time: MethodTime = "passes",
) -> Callable[[Function], Function]:
    """Register a merge method under the `name` that configs use.

    `base`: task vectors need it, it may be absent, it is a model like the others, or it lends its
    config alone (unless the parameter `base_if[0]` is `base_if[1]`).
    `models`: the minimum and maximum number of models besides a separate base.
    `elementwise`: each element of the result depends on the same element of the inputs alone.
    `sparsify`: a function of `_sparsify.TaskVector` that drops elements of each task vector first.
    `linear_layers`: the method merges matrices of linear layers; models that did not change one are
    left out. The option `others` decides about all other tensors.
    `statistics`: the kind that the method needs; units without are averaged.
    `check`: called with the parameters when a merge is planned; raises `ConfigError`.
    `time`: what dominates the run time; `moemerge ls methods` lists it.
    """

    def register(function: Function) -> Function:
        parameters = specifications(function)
        if linear_layers:
            parameters = {"others": OTHERS, **parameters}
        specs = sorted(parameters.values(), key=lambda spec: not spec.per_model)
        schema = MethodSchema(
            name=name,
            summary=summary_of(function, f"merge method {name!r}"),
            base=BasePolicy(base),
            min_models=models[0],
            max_models=models[1],
            parameters=tuple(specs),
            statistics=statistics,
            time=time,
        )
        wants = DATA & inspect.signature(function).parameters.keys()
        METHODS.add(
            name,
            MergeMethod(
                schema, function, parameters, wants, elementwise, sparsify, linear_layers, base_if,
                check,
            ),
        )  # fmt: skip
        return function

    return register


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
