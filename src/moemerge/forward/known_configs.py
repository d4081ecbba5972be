"""Try a config.json with transformers, for jobs that import transformers in any case.

Commands that run no model use `architectures.config_check` alone.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moemerge.errors import ArchitectureError, ResourceError
from moemerge.families.config_check import check_config, check_model_config
from moemerge.families.opened import OpenModel
from moemerge.families.rules import CONFIG_HINT


class UnreadableConfigError(ArchitectureError):
    """The config class of a model type rejects a config."""


def fill_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config with the defaults of its class; None if transformers lacks the model type.

    Raises UnreadableConfigError if the class rejects it.
    """
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return None
    try:
        # From a file, as loading a model reads it: infinity is decoded on the way.
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
            filled = CONFIG_MAPPING[kind].from_pretrained(folder).to_dict()
        made: dict[str, Any] = json.loads(json.dumps(filled, default=str))  # keys become strings
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
    return made


def require_loadable(model: OpenModel) -> None:
    """Refuse a model whose config.json contradicts its tensors or cannot be loaded."""
    check_model_config(model)
    checkpoint = model.checkpoint
    where = str(checkpoint.path / "config.json")
    try:
        filled = fill_config(checkpoint.config)
    except UnreadableConfigError as error:
        raise ArchitectureError(f"{where}: {error.message}", hint=error.hint) from error
    if filled is not None:
        check_config(filled, checkpoint.tensors, f"{where}, with the defaults of transformers")


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
