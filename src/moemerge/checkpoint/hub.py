"""Download models from the Hugging Face hub, and upload them."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, though not marked so
    disable_progress_bars,
    validate_repo_id,
)

from moemerge.errors import CheckpointError, DataError
from moemerge.runtime.files import TEXT_SUFFIXES

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
# Other copies of the weights (subfolders of other formats, Mistral's consolidated files), and files
# of a trainer.
NEVER_FETCHED: Final = [
    "*/*.safetensors",
    "*/*.bin",
    "consolidated*",
    "training_args.bin",
    "optimizer.bin",
]


def fetch(repo: str, revision: str | None, similar: str) -> Path:
    """Return a model's folder in the local hub cache, downloading it if necessary.

    `similar` is a suggestion for the messages, in case the id was meant as a folder.
    """
    try:
        for weights in ("*.safetensors", "*.bin"):
            patterns = [*SMALL_FILES, weights]
            folder = _snapshot(
                repo, revision=revision, allow_patterns=patterns, ignore_patterns=NEVER_FETCHED
            )
            if any(folder.glob(weights)):
                break
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo} on the hub is gated",
            hint=f"accept its terms at https://huggingface.co/{repo}, then run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{repo} on the hub has no revision {revision!r}",
            hint="name a branch, tag or commit that exists there",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"{repo} is neither a folder here{similar} nor a model on the hub",
            hint="check the spelling; a private model needs `hf auth login` first",
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is not a folder here{similar}, is not in the local hub cache, "
            "and the hub cannot be reached",
            hint="check the path, or go online once (is HF_HUB_OFFLINE set?) to fetch it",
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{repo} cannot be fetched from the hub: {error}",
            hint="check the connection and the disk of the hub cache (HF_HOME), then try again",
        ) from error
    return folder


def _snapshot(repo: str, **wanted: Any) -> Path:
    """Download files of a repository; offline, use the cached ones."""
    try:
        return Path(snapshot_download(repo, **wanted))
    except OfflineModeIsEnabled:
        # Some versions of the hub's client use the network even if everything is cached.
        return Path(snapshot_download(repo, local_files_only=True, **wanted))


def fetch_data(repo: str, revision: str | None, pattern: str) -> list[Path]:
    """Return the files of a data set whose path matches `pattern`, from the cache or the hub."""
    try:
        folder = _snapshot(repo, repo_type="dataset", revision=revision, allow_patterns=[pattern])
    except (RepositoryNotFoundError, HFValidationError, RevisionNotFoundError) as error:
        at = f" at {revision}" if revision else ""
        raise DataError(
            f"{repo}{at} is neither a file here nor a data set on the hub",
            hint="check the spelling; a private or gated one needs `hf auth login` first",
        ) from error
    except OSError as error:
        raise DataError(
            f"{repo} is not a file here and cannot be fetched from the hub: {error}",
            hint="check the path and the connection (is HF_HUB_OFFLINE set?)",
        ) from error
    names = (path for path in folder.rglob("*") if os.path.isfile(path))
    matching = [path for path in names if fnmatch(path.relative_to(folder).as_posix(), pattern)]
    return sorted(path for path in matching if path.name.lower().endswith(TEXT_SUFFIXES))


def cached(repo: str, revision: str | None, *, data: str | None = None) -> Path | None:
    """Return the cached folder of a model, or of a data set with files like `data`, or None.

    Does not use the network.
    """
    try:
        folder = snapshot_download(
            repo,
            repo_type="model" if data is None else "dataset",
            revision=revision,
            local_files_only=True,
        )
    except (HFValidationError, OSError):
        return None
    pattern = data or "*.safetensors"
    return Path(folder) if any(Path(folder).rglob(pattern.rpartition("/")[2])) else None


# --- uploads --------------------------------------------------------------------------------------

# Network errors of the hub's client: the base class of its own error, from its HTTP library.
_NETWORK: type[Exception] = HfHubHTTPError.__mro__[1]


def check_upload(repo: str) -> None:
    """Refuse an upload that cannot succeed, before any work: bad name, no connection, no login."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CheckpointError(
            f"{repo!r} cannot name a model on the hub: {_sentence(error)}",
            hint="expected NAME or ORG/NAME",
        ) from error
    try:
        HfApi().whoami()
    except OfflineModeIsEnabled as error:
        raise CheckpointError(
            f"nothing can be uploaded to {repo}: HF_HUB_OFFLINE is set",
            hint="unset it; or leave `push_to_hub` out, and upload the folder when you are online",
        ) from error
    except (LocalTokenNotFoundError, HfHubHTTPError) as error:
        raise CheckpointError(
            f"nothing can be uploaded to {repo}: {_sentence(error)}",
            hint="run `hf auth login` with a token that may write, or set HF_TOKEN",
        ) from error
    except (_NETWORK, OSError) as error:
        raise CheckpointError(
            f"nothing can be uploaded to {repo}: the hub cannot be reached ({_sentence(error)})",
            hint="leave `push_to_hub` out, and upload the folder when you are online",
        ) from error


def upload(folder: Path, repo: str) -> str:
    """Upload all files of `folder` as one commit, create `repo` if necessary, return its URL.

    The folder is never changed.
    """
    api = HfApi()
    disable_progress_bars()
    try:
        api.create_repo(repo, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload with moemerge"
        )
    except (HfHubHTTPError, _NETWORK, OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is written and whole, but could not be uploaded to {repo}: "
            f"{_sentence(error)}",
            hint=f"try again with `hf upload {repo} {folder}`",
        ) from error
    return str(commit.repo_url)


def _sentence(error: Exception) -> str:
    """Return the first line of an error's message, or its class name if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
