"""A model whose headers were read: its checkpoint, its architecture and its name in this run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moemerge.architectures.architecture import Architecture
from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.reader import as_ref
from moemerge.config.models import ModelRef
from moemerge.errors import ArchitectureError


@dataclass(frozen=True)
class OpenModel:
    """A model by the name it has in this run."""

    name: str
    checkpoint: Checkpoint
    architecture: Architecture

    @property
    def label(self) -> str:
        return self.checkpoint.label

    @property
    def what(self) -> str:
        """What messages call it; a model that goes by its label is no source."""
        return self.label if self.name == self.label else f"source {self.name!r} ({self.label})"


def open_model(name: str, ref: str | Path | ModelRef) -> OpenModel:
    """Read a model's headers. A LoRA counts as part of the model it is applied to."""
    model = as_ref(ref)
    plain = Checkpoint.open(replace(model, lora=None, lora_revision=None))
    try:
        architecture = Architecture.of(plain.config, plain.tensors)
    except ArchitectureError as error:
        plain.close()
        raise ArchitectureError(f"{model}: {error.message}", hint=error.hint) from error
    checkpoint = plain if model.lora is None else Checkpoint.open(model)
    checkpoint.label = str(ref)
    return OpenModel(name, checkpoint, architecture)
