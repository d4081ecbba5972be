"""The trained specialists that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from moemerge.errors import CheckpointError
from moemerge.testbed.training import TrainedSet, open_set

BUNDLE = "bundle"


def bundled_set() -> TrainedSet:
    """A base and its specialists for math, code and chat, as `moemerge testbed train` made them."""
    folder = resources.files("moemerge.testbed").joinpath(BUNDLE)
    if not isinstance(folder, Path) or not folder.is_dir():
        raise CheckpointError(
            f"the specialists that come with moemerge are not at {folder}",
            hint="install the package anew, or train some: moemerge testbed train --preset demo "
            "--regime soft --arch olmoe --seed 0 OUT, then moemerge demo --set OUT",
        )
    return open_set(folder)
