"""A config's `wrap:`: which wrappers act around its method, and whether they can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from moemerge.config.checks import value_faults
from moemerge.config.faults import Fault, Path, listed
from moemerge.config.parameters import BasePolicy, MethodSchema, WrapperSchema
from moemerge.config.schema import RunConfig, WrapEntry
from moemerge.registry import did_you_mean

WRAP: Path = ("wrap",)


def wrap_faults(
    config: RunConfig, schemas: Mapping[str, MethodSchema], wrappers: Mapping[str, WrapperSchema]
) -> Iterator[Fault]:
    """Misspelt wrappers and parameters, and methods that no wrapper fits around."""
    method = schemas.get(config.merge_method)
    for i, entry in enumerate(config.wrap or ()):
        place: Path = (*WRAP, i)
        schema = wrappers.get(entry.wrapper)
        if schema is None:
            close = did_you_mean(entry.wrapper, wrappers) or f"; known: {listed(sorted(wrappers))}"
            yield Fault(place, f"unknown wrapper {entry.wrapper!r}{close}")
            continue
        if any(entry.wrapper == other.wrapper for other in (config.wrap or ())[:i]):
            yield Fault(place, f"{entry.wrapper!r} is listed twice")
        yield from _parameters(place, entry, schema)
        if method is not None:
            yield from _unfit(place, method, schema)
    if config.wrap and method is not None and method.base is BasePolicy.MEMBER:
        text = f"{method.name!r} takes the base for a model like the others, and a wrapper needs it"
        yield Fault(WRAP, f"{text} apart: use 'task_arithmetic', with weights that sum to 1")
    elif config.wrap and config.base_model is None and not _sliced_bases(config):
        yield Fault(WRAP, "wrappers need a base_model")


def _sliced_bases(config: RunConfig) -> bool:
    slices = config.body.slices or ()
    return bool(slices) and all(entry.base_model is not None for entry in slices)


def _parameters(place: Path, entry: WrapEntry, schema: WrapperSchema) -> Iterator[Fault]:
    known = {spec.name: spec for spec in schema.parameters}
    for name, value in entry.parameters.items():
        path = (*place, "parameters", name)
        if name in known:
            yield from value_faults(path, value, known[name])
        else:
            close = did_you_mean(name, known) or f"; {schema.name!r} takes: {listed(known)}"
            yield Fault(path, f"unknown parameter{close}")


def _unfit(place: Path, method: MethodSchema, schema: WrapperSchema) -> Iterator[Fault]:
    if not schema.turns:
        return
    if method.max_models == 1:
        text = f"{schema.name!r} aligns several models, and {method.name!r} takes one"
        yield Fault(place, text)
    if method.statistics == "fisher":
        text = f"{method.name!r} knows single weights, which {schema.name!r} turns into others"
        yield Fault(place, text)
