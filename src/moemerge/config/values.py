"""Parameter values as mergekit writes them: a scalar, a gradient over layers, or a list of filters.

- a number, `true`/`false` (1 and 0), or a word where a method offers choices;
- a list of numbers: a gradient. With t in [0, 1] the depth in the slice and n values, the value at
  s = t (n - 1) is interpolated linearly between the neighbours of s;
- a list of `{filter, value}`: the first filter that matches decides; `*` or no filter matches all.
  When none matches, the next wider scope is asked. One `{filter, value}` alone counts as a list of
  one.

A filter is a plain substring of a name of the tensor, or `role:NAME`, equal to what the tensor is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moemerge.config.parameters import Scalar
from moemerge.config.problems import Path, Problem, ProblemsError, shown
from moemerge.registry import did_you_mean

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

    @property
    def catches_all(self) -> bool:
        return self.filter is None

    def matches(self, names: Sequence[str], role: str | None) -> bool:
        if self.filter is None:
            return True
        if self.filter.startswith(ROLE_PREFIX):
            return role == self.filter[len(ROLE_PREFIX) :]
        wanted = self.filter
        return any(wanted in name for name in names)


@dataclass(frozen=True)
class Conditional:
    """A list of filters, asked in order."""

    branches: tuple[Branch, ...]

    @property
    def complete(self) -> bool:
        """Whether every tensor gets a value."""
        return any(branch.catches_all for branch in self.branches)


ParameterValue = Scalar | Gradient | Conditional


def evaluate(
    value: ParameterValue, names: Sequence[str], role: str | None, t: float
) -> Scalar | None:
    """The value for a tensor called `names`, at depth `t`; None when no filter matches."""
    if isinstance(value, Conditional):
        for branch in value.branches:
            if branch.matches(names, role):
                return branch.value.at(t) if isinstance(branch.value, Gradient) else branch.value
        return None
    return value.at(t) if isinstance(value, Gradient) else value


def layer_depth(index: int, count: int) -> float:
    """t of layer `index` in a slice of `count` layers; outside the layers (embeddings, final norm,
    head) t is 0. A slice of one layer counts as its own end, as in mergekit."""
    return 1.0 if count == 1 else index / (count - 1)


def leaves(value: ParameterValue) -> Iterator[tuple[Path, Scalar]]:
    """Every scalar inside a value, with its place."""
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
    """The value as YAML data; `parse_value` gives it back."""
    if isinstance(value, Conditional):
        return [
            {"value": plain(b.value)} if b.filter is None
            else {"filter": b.filter, "value": plain(b.value)}
            for b in value.branches
        ]  # fmt: skip
    return list(value.points) if isinstance(value, Gradient) else value


def parse_value(raw: object) -> ParameterValue:
    """Read a parameter's value; raises `ProblemsError` with every fault found in it."""
    if isinstance(raw, (Gradient, Conditional)):
        return raw
    if isinstance(raw, Mapping):
        return _conditional([raw], bare=True)
    if not isinstance(raw, (list, tuple)):
        return _scalar(raw)
    if not raw:
        raise ProblemsError.one("an empty list has no value")
    if any(isinstance(item, Mapping) for item in raw):
        return _conditional(raw)
    return _gradient(raw)


def _scalar(raw: object) -> Scalar:
    if isinstance(raw, str) or (isinstance(raw, (int, float)) and _finite(raw)):
        return raw
    if isinstance(raw, (int, float)):
        raise ProblemsError.one(f"expected a finite number, not {shown(raw)}")
    raise ProblemsError.one(
        f"expected a number, a list of numbers or a list of {{filter, value}}, not {shown(raw)}"
    )


def _finite(number: float) -> bool:
    """Also of whole numbers that no float can hold."""
    return abs(number) <= sys.float_info.max


def _gradient(raw: Sequence[object]) -> Gradient:
    found = []
    points = []
    for i, item in enumerate(raw):
        if isinstance(item, (int, float)) and _finite(item):
            points.append(float(item))
        else:
            found.append(Problem((i,), f"a gradient is a list of numbers, not {shown(item)}"))
    if found:
        raise ProblemsError(found)
    return Gradient(tuple(points))


def _conditional(raw: Sequence[object], *, bare: bool = False) -> Conditional:
    found: list[Problem] = []
    branches: list[Branch] = []
    for i, item in enumerate(raw):
        here: Path = () if bare else (i,)
        if branches and branches[-1].catches_all:
            found.append(
                Problem(here, "never used: the entry before it matches everything", ignorable=True)
            )
            continue
        try:
            branches.append(_branch(item))
        except ProblemsError as problems:
            found.extend(p.under(here) for p in problems.found)
    if found:
        raise ProblemsError(found)
    return Conditional(tuple(branches))


def _branch(raw: object) -> Branch:
    if not isinstance(raw, Mapping):
        raise ProblemsError.one(
            f"expected {{filter, value}} like the entries beside it, not {raw!r}"
        )
    keys = ("filter", "value")
    unknown = [key for key in raw if key not in keys]
    if unknown:
        raise ProblemsError(
            [
                Problem((key,), f"unknown key{did_you_mean(str(key), keys) or _known(keys)}", True)
                for key in unknown
            ]
        )
    if raw.get("value") is None:
        raise ProblemsError.one("needs a `value`")
    pattern = _filter(raw.get("filter"))
    try:
        value = parse_value(raw["value"])
    except ProblemsError as problems:
        raise ProblemsError([p.under(("value",)) for p in problems.found]) from None
    if isinstance(value, Conditional):
        raise ProblemsError.one("filters cannot be nested: give a number or a gradient", "value")
    return Branch(pattern, value)


def _known(keys: Sequence[str]) -> str:
    return f"; known here: {', '.join(keys)}"


def _filter(raw: object) -> str | None:
    if raw is None or raw in (EVERYTHING, ""):
        return None
    if not isinstance(raw, str):
        raise ProblemsError.one(f"a filter is text, not {raw!r}: put it in quotes", "filter")
    if raw.startswith(ROLE_PREFIX):
        role = raw[len(ROLE_PREFIX) :]
        if role not in ROLE_NAMES:
            close = did_you_mean(role, ROLE_NAMES) or _known(ROLE_NAMES)
            raise ProblemsError.one(f"unknown role {role!r}{close}", "filter")
    return raw
