"""Saved states of a training run, in a hidden folder next to OUT, for the next run.

The trainer writes each state into its own folder, `checkpoint-STEP`. A state counts once it
contains `complete`, the list of its files with their sizes. The files are synced to disk before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.output import writing
from moemerge.errors import CheckpointError
from moemerge.lockstep.journal import JournalFolder
from moemerge.runtime.files import open_plain, read_object, replace_file, sync_folder
from moemerge.runtime.journals import saved_path

COMPLETE: Final = "complete"
FORMAT: Final = 2  # raised when older states can no longer be used
_PREFIX: Final = "checkpoint-"


class SavedStates:
    """The states of one run; `folder` exists until `close`."""

    def __init__(self, out: Path, key: Mapping[str, Any], *, replace: bool = False) -> None:
        """Open the states of this run; those of another one are refused, or replaced."""
        self.finished = False  # OUT exists: no state is needed any more
        self._place = JournalFolder(out, saved_path(out), {"format": FORMAT, **key})
        self.folder = self._place.folder
        with writing(self.folder):
            try:
                usable = self._place.lock() and self.latest() is not None
                if usable and self._place.continues(replace=replace):
                    self.prune()
                else:
                    self._place.create()
            except BaseException:
                self._place.close()
                raise

    def latest(self) -> Path | None:
        """Return the last complete state."""
        return max(filter(_is_complete, self._all()), key=_step, default=None)

    def _all(self) -> list[Path]:
        return [p for p in self.folder.glob(f"{_PREFIX}*") if p.name[len(_PREFIX) :].isdigit()]

    def prune(self) -> None:
        """Delete all but the last complete state."""
        last = self.latest()
        for path in self._all():
            if path != last:
                shutil.rmtree(path, ignore_errors=True)

    def close(self, *, keep: bool) -> None:
        """Release the folder. With `keep` the last complete state stays, if there is one."""
        if keep and self.latest() is not None:
            self.prune()
            self._place.close()
        else:
            self._place.remove()


def mark_complete(state: Path) -> None:
    """Sync all files of a state, then mark it complete."""
    sizes = _sizes(state)
    for name in sizes:
        with open(open_plain(state / name), "rb") as file:
            os.fsync(file.fileno())
    replace_file(state / COMPLETE, json.dumps(sizes).encode())
    sync_folder(state.parent)


def _is_complete(state: Path) -> bool:
    try:
        stored, present = read_object(state / COMPLETE), _sizes(state)
    except CheckpointError:
        return False
    # Other ranks may have added to the folder since it was marked.
    return all(present.get(name, -1) >= size for name, size in stored.items())


def _sizes(state: Path) -> dict[str, int]:
    return {
        str(path.relative_to(state)): path.stat().st_size
        for path in sorted(state.rglob("*"))
        if os.path.isfile(path) and path != state / COMPLETE
    }


def _step(state: Path) -> int:
    return int(state.name[len(_PREFIX) :])
