"""An opened model: checkpoint, architecture and its name in this run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.reader import Structure, as_ref
from moemerge.config.models import ModelRef
from moemerge.errors import ArchitectureError
from moemerge.families.architecture import Architecture
from moemerge.families.reading import way_out
from moemerge.families.rules import CONFIG_HINT


@dataclass(frozen=True)
class OpenModel:
    """A model with its name in this run. Only headers were read."""

    name: str
    checkpoint: Checkpoint
    architecture: Architecture

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @property
    def what(self) -> str:
        """Return the model's name for messages; sources have a name besides their label."""
        return self.label if self.name == self.label else f"source {self.name!r} ({self.label})"

    def require_readable(self, hint: str) -> None:
        """Refuse quantised weights of an unsupported format."""
        if self.architecture.quantised:
            raise ArchitectureError(
                f"{self.label} is quantised in a way that is not read "
                f"({self.architecture.quantised})",
                hint=way_out(self.architecture.quantised) or hint,
            )


# Models with one structure share its description.
_ARCHITECTURES: WeakKeyDictionary[Structure, Architecture] = WeakKeyDictionary()


def open_model(name: str, ref: str | Path | ModelRef) -> OpenModel:
    """Read a model's headers. A LoRA is part of the model it is applied to."""
    model = as_ref(ref)
    plain = Checkpoint.open(ModelRef(model.path, model.revision))
    architecture = _ARCHITECTURES.get(plain.structure)
    try:
        if architecture is None:
            architecture = Architecture.of(plain.config, plain.tensors)
            _ARCHITECTURES[plain.structure] = architecture
    except ArchitectureError as error:
        plain.close()
        raise ArchitectureError(f"{model}: {error.message}", hint=error.hint) from error
    checkpoint = plain if model.lora is None else Checkpoint.open(model)
    checkpoint.label = str(ref)
    return OpenModel(name, checkpoint, architecture)


# Model code or shapes depend on these, so models with the same tensors share them.
_STRUCTURE = re.compile(
    r"(hidden_act|activation|activation_function|_heads|_groups|_rank|head_dim|intermediate_size"
    r"|hidden_size|_bias)$"
)


def check_configs(models: Sequence[OpenModel]) -> None:
    """Refuse models of one family whose configs have values of different types for a key.

    OUT gets one of these configs, and merging does not build the model. A number that has become a
    string would otherwise fail only when OUT is loaded.
    """
    for other in models[1:]:
        first = models[0]
        if first.architecture.family is not other.architecture.family:
            continue
        for name in sorted(first.checkpoint.config.keys() & other.checkpoint.config.keys()):
            values = (first.checkpoint.config[name], other.checkpoint.config[name])
            if None not in values and _kind(values[0]) != _kind(values[1]):
                raise ArchitectureError(
                    f"config.json: {name} is {values[0]!r:.80} in {first.label}, but "
                    f"{values[1]!r:.80} in {other.label}",
                    hint=CONFIG_HINT,
                )


def config_difference(config: Mapping[str, Any], models: Iterable[OpenModel]) -> str | None:
    """Describe the first value in which a config and one of a model of its type differ, of those
    on which the model's code or shapes depend."""
    own = dict(_structure(config))
    for model in models:
        if config.get("model_type") != model.checkpoint.config.get("model_type"):
            continue
        for name, theirs in _structure(model.checkpoint.config):
            if name in own and own[name] != theirs:
                return f"{name} is {own[name]!r:.80}, but {theirs!r:.80} in {model.label}"
    return None


def _structure(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _structure(value, f"{before}{name}.")
        elif value is not None and not isinstance(value, list) and _STRUCTURE.search(name):
            yield before + name, value


def _kind(value: object) -> type:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if number else type(value)
