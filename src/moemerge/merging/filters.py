"""Filters of a config that decide nothing, which nobody writes on purpose."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from moemerge.config.checks import ConfigFilter
from moemerge.config.faults import Fault, listed
from moemerge.config.parameter_values import ROLE_PREFIX, ParameterReader, TensorContext
from moemerge.registry import did_you_mean


def filter_faults(
    filters: Sequence[ConfigFilter],
    readers: Sequence[ParameterReader],
    names: Mapping[str, Collection[str]],
) -> Iterator[Fault]:
    """Filters that match no tensor, or whose tensors all get their value elsewhere.

    The readers have looked up the parameters of every tensor; `names` are the names of the merged
    tensors by role.
    """
    for item in filters:
        wanted = item.branch.filter
        assert wanted is not None  # a catch-all is no filter
        asked = [r.decided[id(item.value)] for r in readers if id(item.value) in r.decided]
        if not any(item.branch.matches(TensorContext(0, *pair)) for pair in _pairs(names)):
            yield Fault(item.path, f"{wanted!r} matches no tensor{_meant(wanted, names)}", True)
        elif asked and not any(item.number in decided for decided in asked):
            text = "all its tensors get their value from a filter before it, or from a nearer scope"
            yield Fault(item.path, f"{wanted!r} has no effect: {text}", True)


def _pairs(names: Mapping[str, Collection[str]]) -> Iterator[tuple[Sequence[str], str]]:
    return ((tuple(own), role) for role, own in names.items())


def _meant(wanted: str, names: Mapping[str, Collection[str]]) -> str:
    if wanted.startswith(ROLE_PREFIX):
        return f"; the merged tensors have the roles {listed(sorted(names))}"
    words = {word for own in names.values() for name in own for word in name.split(".")}
    close = did_you_mean(wanted, sorted(words)) if "." not in wanted else ""
    return close or "; a filter is part of a tensor's name"
