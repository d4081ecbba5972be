"""Small specialists that come with the package, the tasks they solve, and the demo.

A set of models is a folder with a base, one specialist per domain, their calibration text and a
manifest. `python -m evidence train` in the repository trains such sets.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from moemerge.errors import CheckpointError

MANIFEST = "testbed.json"
BUNDLE = "bundle"  # the set that comes with the package
BASE = "base"
DATA = "data"


@dataclass(frozen=True)
class TrainedSet:
    """Folders of a base and its specialists, and each domain's calibration text."""

    folder: Path
    base: Path
    models: dict[str, Path]
    data: dict[str, Path]
    manifest: dict[str, Any]


def open_set(folder: str | Path) -> TrainedSet:
    """Return the set of models in a folder."""
    folder = Path(folder)
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        domains = list(manifest["domains"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} is not a set of models: {MANIFEST} cannot be read ({error})",
            hint="train one with `python -m evidence train` in moemerge's repository",
        ) from error
    trained = TrainedSet(
        folder=folder,
        base=folder / BASE,
        models={domain: folder / domain for domain in domains},
        data={domain: folder / DATA / f"{domain}.jsonl" for domain in domains},
        manifest=manifest,
    )
    for path in (trained.base, *trained.models.values(), *trained.data.values()):
        if not os.path.exists(path):
            raise CheckpointError(f"the set of models {folder} is incomplete: {path} is missing")
    return trained


def bundled_set() -> TrainedSet:
    """Return the bundled base and its specialists for math, code and chat."""
    folder = resources.files("moemerge.lab.testbed").joinpath(BUNDLE)
    if not isinstance(folder, Path) or not os.path.isdir(folder):
        raise CheckpointError(
            f"the bundled specialists are missing: {folder} does not exist",
            hint="reinstall the package",
        )
    return open_set(folder)
