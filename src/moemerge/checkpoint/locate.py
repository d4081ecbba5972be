"""Find the folder of a model that the user names by path or by Hugging Face hub id."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from moemerge.errors import CheckpointError, DataError
from moemerge.registry import did_you_mean
from moemerge.runtime.files import TEXT_SUFFIXES

HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


def locate(model: str, revision: str | None = None) -> Path:
    """Return the folder of a model or adapter.

    An existing folder has precedence. Otherwise `org/name` is a hub id, downloaded into the local
    hub cache or, offline, read from there.
    """
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):
        if revision is not None:
            raise CheckpointError(
                f"{model} is a folder, so it has no revision {revision!r}",
                hint="leave the @revision out, or name a hub id (org/name@revision)",
            )
        return folder
    if os.path.exists(folder):
        raise CheckpointError(
            f"{model} is a file, expected a model folder or a hub id (org/name)",
            hint=f"did you mean its folder, {folder.parent}?",
        )
    if is_hub_id(model):
        from moemerge.checkpoint.hub import fetch  # a slow import that folders do not need

        return fetch(model, revision, similar(folder))
    raise CheckpointError(
        f"the model folder {model} does not exist{similar(folder)}",
        hint="name an existing folder or a hub id (org/name)",
    )


def is_hub_id(model: str) -> bool:
    """Return whether `locate` would look for the model on the hub."""
    if os.path.exists(os.path.expanduser(model)):
        return False
    return HUB_ID.fullmatch(model) is not None and not model.startswith((".", "/"))


def hub_ids(model: str) -> list[str]:
    """Return the hub ids in `path@revision+lora@revision#layout`, as a model card lists them."""
    if os.path.exists(os.path.expanduser(model)):
        return []
    return [part for p in model.split("+") if is_hub_id(part := re.split("[@#]", p)[0])]


def similar(folder: Path) -> str:
    """Return `, did you mean ...?` with a sibling of a missing folder, or nothing."""
    parent = folder.absolute().parent
    if not os.path.isdir(parent) or not os.access(parent, os.R_OK | os.X_OK):
        return ""
    return did_you_mean(folder.name, [p.name for p in parent.iterdir() if os.path.isdir(p)])


_DATA_SET: Final = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<files>.+))?"
)
TRAINING_FILES: Final = "*train*"


def _data_set(source: str) -> re.Match[str] | None:
    """Return the parts of a hub data set's name; None for a local file, existing or not."""
    suffixed = source.lower().endswith(TEXT_SUFFIXES) and ":" not in source
    exists = os.path.exists(os.path.expanduser(source))
    return None if exists or suffixed else _DATA_SET.fullmatch(source)


def is_local(source: str) -> bool:
    """Return whether `source` names a local file, existing or not, instead of a hub data set."""
    return _data_set(source) is None


def locate_data(source: str) -> list[Path]:
    """Return the text files of `source`: a local file, or files of a hub data set.

    `org/name@revision:PATTERN` selects the data set's files whose path matches; by default those
    with `train` in it.
    """
    match = _data_set(source)
    if match is None:
        return [Path(os.path.expanduser(source))]
    from moemerge.checkpoint.hub import fetch_data  # a slow import that files do not need

    files = fetch_data(match["repo"], match["revision"], match["files"] or TRAINING_FILES)
    if not files:
        raise DataError(
            f"{source}: no file of text ({', '.join(TEXT_SUFFIXES)}) matches "
            f"{match['files'] or TRAINING_FILES!r} there",
            hint="name them: org/name:PATTERN, such as openai/gsm8k:main/train*",
        )
    return files


def is_here(source: str, *, data: bool = False) -> bool:
    """Return whether a model, or text, is on this machine, including the hub cache."""
    if os.path.exists(os.path.expanduser(source)):
        return True
    match = _data_set(source) if data else None
    if data and match is None:
        return False
    from moemerge.checkpoint.hub import cached  # a slow import that files do not need

    if match is None:
        repo, _, revision = source.partition("@")
        return is_hub_id(repo) and cached(repo, revision or None) is not None
    files = match["files"] or TRAINING_FILES
    return cached(match["repo"], match["revision"], data=files) is not None
