"""A finished output folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # public, though not marked so
    disable_progress_bars,
    validate_repo_id,
)

from moemerge.errors import CheckpointError

# What the hub's client raises of the network: the base of its own error, from whichever HTTP
# library it is built on.
_NETWORK: type[Exception] = HfHubHTTPError.__mro__[1]


def check_upload(repo: str) -> None:
    """Refuse before any work what could not be uploaded after it: a name that is none, a hub that
    cannot be reached, a user whom it does not know."""
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
    """All files of `folder` as one commit of `repo`, which is made where it does not exist; its
    address. The folder stays as it is, whatever happens."""
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
    """The first line of what a library says, or the error's name where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
