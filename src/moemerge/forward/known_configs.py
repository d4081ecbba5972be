"""Check with transformers that a config.json fits the tensors next to it.

A merge copies the config of one input and builds no model of it: `merge` compares the inputs'
configs (`families.opened`). `validate`, `compose` and all jobs that run a model build it on the
meta device here, without weights.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import ArchitectureError, CheckpointError, ResourceError
from moemerge.families.names import split_layer
from moemerge.families.opened import OpenModel
from moemerge.families.rules import CONFIG_HINT

# Tensors of a layer of multi-token prediction that no other layer has. transformers ignores it.
_PREDICTION = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head|embed_tokens|mtp\w*)\.")


class UnreadableConfigError(ArchitectureError):
    """The config class of a model type rejects a config."""


def fill_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config with the defaults of its class; None if transformers lacks the model type.

    Raises UnreadableConfigError if the class rejects it.
    """
    made = _read(config)
    filled: dict[str, Any] | None = None
    if made is not None:
        filled = json.loads(json.dumps(made.to_dict(), default=str))  # keys become strings
    return filled


def _read(config: Mapping[str, Any]) -> Any:
    """Return the config object that transformers makes; None if it lacks the model type."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    try:
        # From a file, as loading a model reads it: infinity is decoded on the way.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
            return CONFIG_MAPPING[kind].from_pretrained(folder)
    except Exception as error:  # config classes document no exceptions
        if isinstance(error, OSError) and error.errno is not None:  # not one of transformers
            raise ResourceError(
                f"a temporary file cannot be written: {error}",
                hint="free some space there, or set TMPDIR to another folder",
            ) from error
        reason = " ".join(str(error).split())[:300]
        raise UnreadableConfigError(
            f"transformers cannot read it: {type(error).__name__}: {reason}", hint=CONFIG_HINT
        ) from error


def require_loadable(model: OpenModel) -> None:
    """Refuse a model of which transformers cannot build exactly its tensors."""
    checkpoint = model.checkpoint
    where = str(checkpoint.path / "config.json")
    check_loadable(checkpoint.config, checkpoint.tensors, where)


def check_loadable(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], where: str
) -> None:
    """Raise ArchitectureError unless transformers builds a model of `config` from `tensors` alone.

    Its parameters must be there, in their shapes, and no layer may be left out. `where` names the
    config in messages. A model type that transformers does not have passes.
    """
    import torch

    from moemerge.forward.loading import map_stored, skeleton_of, tied_names

    try:
        made_config = _read(config)
    except UnreadableConfigError as error:
        raise ArchitectureError(f"{where}: {error.message}", hint=error.hint) from error
    if made_config is None:
        return
    model = skeleton_of(made_config, where)

    def on_meta(name: str) -> torch.Tensor:
        return torch.empty(tensors[name].shape, device="meta", dtype=torch.float32)

    try:
        names = map_stored(model, tensors, where)
        made: dict[str, tuple[int, ...]] = {}
        for recipe in names.recipes.values():
            made |= {name: tuple(v.shape) for name, v in recipe.convert(model, on_meta).items()}
    except CheckpointError as error:
        raise ArchitectureError(f"{where}: {error.message}", hint=CONFIG_HINT) from error
    tied = tied_names(model)
    for name, parameter in model.named_parameters():
        if name not in made and tied.get(name) not in made:
            raise ArchitectureError(
                f"{where}: the model needs {name} {tuple(parameter.shape)}, which is missing",
                hint=CONFIG_HINT,
            )
        shape = made.get(name, tuple(parameter.shape))
        if shape != tuple(parameter.shape):
            raise ArchitectureError(
                f"{where}: it makes {name} {tuple(parameter.shape)}, but the checkpoint has "
                f"{shape}",
                hint=CONFIG_HINT,
            )
    unused: dict[int, list[str]] = {}
    used = {split_layer(name) for r in names.recipes.values() for _, name in r.sources}
    numbers = {layer.layer for layer in used if layer is not None}
    for name in names.unused:
        layer = split_layer(name)
        if layer is not None:
            unused.setdefault(layer.layer, []).append(name)
    for number, left in sorted(unused.items()):
        if number not in numbers and not any(map(_PREDICTION.search, left)):
            raise ArchitectureError(
                f"{where}: the model has no layer {number}, but the checkpoint has {left[0]}",
                hint=CONFIG_HINT,
            )


def parameter_names(config: Mapping[str, Any]) -> set[str] | None:
    """Return the names in memory of a model's parameters; None if transformers lacks its class."""
    import torch
    import transformers

    cls = getattr(transformers, str((config.get("architectures") or [None])[0]), None)
    kind = str(config.get("model_type"))
    if cls is None or kind not in transformers.CONFIG_MAPPING:
        return None
    with torch.device("meta"):
        return set(cls(transformers.CONFIG_MAPPING[kind].from_dict(dict(config))).state_dict())
