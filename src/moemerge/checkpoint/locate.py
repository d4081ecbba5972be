"""From what a user writes to a folder: a path, or an id on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from moemerge.errors import CheckpointError
from moemerge.registry import did_you_mean

HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
SMALL_FILES: Final = (
    "*.json",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
# Second copies of the weights: subfolders of other formats, Mistral's consolidated files, and
# what a trainer leaves behind.
NEVER_FETCHED: Final = [
    "*/*.safetensors",
    "*/*.bin",
    "consolidated*",
    "training_args.bin",
    "optimizer.bin",
]


def locate(model: str, revision: str | None = None) -> Path:
    """The folder of a model or adapter. An existing folder is meant as such; `org/name` that is
    none is a hub id, fetched into the local hub cache, or taken from there offline."""
    folder = Path(os.path.expanduser(model))
    if os.path.isdir(folder):
        if revision is not None:
            raise CheckpointError(
                f"{model} is a folder, so it has no revision {revision!r}",
                hint="leave the @revision out, or give a hub id (org/name@revision)",
            )
        return folder
    if os.path.exists(folder):
        raise CheckpointError(
            f"{model} is a file, expected a model folder or a hub id (org/name)",
            hint=f"did you mean its folder, {folder.parent}?",
        )
    if HUB_ID.fullmatch(model) and not model.startswith((".", "/")):
        return _from_hub(model, revision)
    raise CheckpointError(
        f"the model folder {model} does not exist{_similar(folder)}",
        hint="give an existing folder or a hub id (org/name)",
    )


def _similar(folder: Path) -> str:
    parent = folder.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.R_OK | os.X_OK):
        return ""
    return did_you_mean(folder.name, [p.name for p in parent.iterdir() if p.is_dir()])


def _from_hub(repo: str, revision: str | None) -> Path:
    try:
        folder = _download(repo, revision, "*.safetensors")
        if not any(folder.glob("*.safetensors")):
            folder = _download(repo, revision, "*.bin")
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo} on the hub is gated",
            hint=f"accept its terms at https://huggingface.co/{repo}, then run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo} on the hub has no revision {revision!r}",
            hint="give a branch, tag or commit that exists there",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{repo} is neither a folder here{_similar(Path(repo))} nor a model on the hub",
            hint="check the spelling; a private model needs `hf auth login` first",
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is no folder here{_similar(Path(repo))}, is not in the local hub cache, "
            "and the hub cannot be reached",
            hint="check the path, or go online once (is HF_HUB_OFFLINE set?) to fetch it",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{repo} cannot be fetched from the hub: {error}",
            hint="check the connection and the disk of the hub cache (HF_HOME), then try again",
        ) from error
    return folder


def _download(repo: str, revision: str | None, weights: str) -> Path:
    """The snapshot with its weights; without a network, what the cache holds of it."""
    folder = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=[*SMALL_FILES, weights],
        ignore_patterns=NEVER_FETCHED,
    )
    return Path(folder)
