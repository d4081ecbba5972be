"""A file of coefficients: how much of each model, place by place.

    coefficients:
      math: {"*": 0.5, model.layers.0: 0.4, model.layers.1.mlp.experts.3: 0.1}
      code: {"*": 0.5}

A place is the key of a unit, the dotted beginning of one (a layer, an expert), or `*` for all; of
those that fit a unit the longest counts. Neurons of an MLP (row j of gate and up, column j of down)
may have coefficients of their own, by groups:

    neurons:
      groups:
        math: {math: 1.0, code: 0.0}
        code: {math: 0.0, code: 1.0}
      labels: {model.layers.1.mlp.experts.3: "0110"}  # each neuron's group, by its place above
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any, Final

from pydantic import Field

from moemerge.config.faults import Fault, Path, listed
from moemerge.config.fields import Name, NotEmpty, Strict
from moemerge.config.parameters import BasePolicy, MethodSchema
from moemerge.config.resolve import NormalisedMerge
from moemerge.config.yaml_lines import Document, dump_document, read_yaml
from moemerge.errors import ConfigError
from moemerge.registry import did_you_mean
from moemerge.runtime.files import read_utf8

EVERYWHERE: Final = "*"
KEY: Final = "coefficients"
NEURONS: Final = "neurons"
LETTERS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"  # of groups, in their order
WEIGHT: Final = "weight"  # the parameter that a coefficient multiplies
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Places = Annotated[dict[Name, Number], NotEmpty]


class NeuronGroups(Strict):
    """Groups of neurons, and how much of each model a group takes."""

    groups: Annotated[dict[Name, dict[Name, Number]], NotEmpty]
    labels: Annotated[dict[Name, Name], NotEmpty]  # by an MLP's place: a letter for every neuron


class CoefficientsFile(Strict):
    """The content of a coefficients file; `made_by` is for human readers."""

    coefficients: Annotated[dict[Name, Places], NotEmpty]
    neurons: NeuronGroups | None = None
    made_by: dict[str, Any] | None = None


@dataclass(frozen=True)
class Coefficients:
    """How much of each model, by name and place, with the file's line numbers."""

    values: Mapping[str, Mapping[str, float]]
    made_by: Mapping[str, Any] = field(default_factory=dict)
    neurons: NeuronGroups | None = None
    document: Document = field(default_factory=Document, compare=False)

    def place(self, model: str, key: str) -> str | None:
        """Return the place that applies to a unit of a model: the longest that matches."""
        places, parts = self.values[model], key.split(".")
        candidates = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        own = next((name for name in candidates if name in places), None)
        return own or (EVERYWHERE if EVERYWHERE in places else None)

    def neuron_shares(self, model: str) -> tuple[float, ...]:
        """Return the coefficient of a model's change in every group of neurons."""
        assert self.neurons is not None
        return tuple(shares[model] for shares in self.neurons.groups.values())

    def idle(self, used: Collection[tuple[str, str]]) -> Iterator[Fault]:
        """Report places that match no unit."""
        for place in {} if self.neurons is None else self.neurons.labels:
            if not any((model, place) in used for model in self.values):
                text = "fits no MLP: a place is the name that its projections have in common"
                yield Fault((NEURONS, "labels", place), text)
        for model, places in self.values.items():
            for place in places:
                if place != EVERYWHERE and (model, place) not in used:
                    text = "fits no tensor: a place is a tensor's name or its dotted beginning"
                    yield Fault((KEY, model, place), text)


def read_coefficients(file: str | FilePath) -> Coefficients:
    """Read a YAML or JSON file and check its form; all faults are in one error."""
    hint = "make it with `moemerge coefficients`"
    document = read_yaml(read_utf8(FilePath(file), hint, ConfigError), str(file))
    held = document.parse(CoefficientsFile)
    return Coefficients(held.coefficients, held.made_by or {}, held.neurons, document)


def dump_coefficients(
    values: Mapping[str, Mapping[str, float]],
    made_by: Mapping[str, Any],
    neurons: NeuronGroups | None = None,
) -> bytes:
    """Return the bytes of a file; reading it returns the same numbers."""
    data: dict[str, Any] = {
        "made_by": dict(made_by),
        KEY: {model: dict(places) for model, places in values.items()},
    }
    if neurons is not None:
        data[NEURONS] = neurons.model_dump()
    return dump_document(data).encode()


def coefficient_faults(coefficients: Coefficients, merge: NormalisedMerge) -> Iterator[Fault]:
    """Check that every merged model has coefficients, and nothing else has."""
    merged = dict.fromkeys(m.name for s in merge.slices for m in s.inputs)
    for name in coefficients.values:
        if name not in merged:
            close = did_you_mean(name, merged) or f"; merged are {listed(merged)}"
            yield Fault((KEY, name), f"no merged model is called {name!r}{close}")
    lacking = [name for name in merged if name not in coefficients.values]
    if lacking:
        yield Fault((KEY,), f"no coefficients for {listed(lacking)}")
    if coefficients.neurons is not None:
        yield from _neuron_faults(coefficients.neurons, merge, tuple(merged))


def _neuron_faults(
    neurons: NeuronGroups, merge: NormalisedMerge, merged: tuple[str, ...]
) -> Iterator[Fault]:
    """Check that every group has a coefficient for every merged model, and every letter a group."""
    for group, shares in neurons.groups.items():
        unlike = sorted(set(shares) ^ set(merged))
        if unlike:
            text = f"needs one coefficient for each of {listed(merged)}; differs in {unlike[0]!r}"
            yield Fault((NEURONS, "groups", group), text)
    if len(neurons.groups) > len(LETTERS):
        text = f"{len(neurons.groups)} groups, and letters for {len(LETTERS)}"
        yield Fault((NEURONS, "groups"), text)
    known = set(LETTERS[: len(neurons.groups)])
    for place, labels in neurons.labels.items():
        strange = sorted(set(labels) - known)
        if strange:
            text = (
                f"{strange[0]!r} names no group: the first is {LETTERS[0]}, the next {LETTERS[1]}"
            )
            yield Fault((NEURONS, "labels", place), text)
    for schema in (merge.schema, merge.router_schema):
        if schema is not None and not _has_base(schema, merge):
            text = f"{schema.name!r} keeps no base apart to scale changes by"
            yield Fault((NEURONS,), text)


def unweighed_faults(merge: NormalisedMerge, place: Path) -> Iterator[Fault]:
    """Report methods without weights and without a base to scale changes against."""
    for schema in (merge.schema, merge.router_schema):
        if schema is not None and not weighs(schema) and not _has_base(schema, merge):
            text = f"{schema.name!r} takes no weights, and keeps no base apart to scale changes by"
            yield Fault(place, text)


def weighs(schema: MethodSchema) -> bool:
    """Return whether a method has a weight for each model; if not, the model's change is scaled."""
    return any(spec.name == WEIGHT and spec.per_model for spec in schema.parameters)


def _has_base(schema: MethodSchema, merge: NormalisedMerge) -> bool:
    if schema.base is BasePolicy.OPTIONAL:
        return merge.base_model is not None
    return schema.base is BasePolicy.REQUIRED
