"""Unfinished work in a hidden folder next to OUT, and the saved states of a training run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.output import writing
from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.files import lock_folder, read_object
from moemerge.runtime.journals import saved_path

KEY_FILE: Final = "key.json"
DIGEST_LENGTH: Final = 64  # of SHA-256 in hexadecimal


class WorkFolder:
    """A hidden folder for the unfinished work of one run at a time.

    `key.json` states what the work depends on, and a lock keeps other runs away. `continues` is
    whether the folder has work of this run. That of another run is refused, or removed if
    `replace`.
    """

    def __init__(
        self, out: Path, folder: Path, key: Mapping[str, Any], *, replace: bool = False
    ) -> None:
        self.folder = folder
        self.continues = False
        self._out = out
        self._key: dict[str, Any] = json.loads(json.dumps(key))
        self._owned = False
        self._lock: int | None = None  # also None on a file system without locks
        self._made: list[Path] = []  # parents of OUT that did not exist
        if os.path.islink(folder) or os.path.isfile(folder):
            raise CheckpointError(
                f"{folder} is not a moemerge folder, and unfinished work would be stored there",
                hint="remove it, or choose another output folder",
            )
        if not os.path.isdir(folder):
            return
        self._take_lock()
        try:
            stored = read_object(folder / KEY_FILE)
        except CheckpointError:  # killed before the key was written
            self.remove()
            return
        self.continues = stored == self._key
        if not self.continues and not replace:
            self.close()
            raise UsageError(
                f"{folder} has the unfinished work of another run\n  "
                + "\n  ".join(_differences(stored, self._key)),
                hint="to continue it, repeat its settings and inputs; to start anew, use "
                "`overwrite=True`",
            )
        if not self.continues:
            self.remove()

    def create(self) -> None:
        """Create the folder, locked and with its key."""
        self._made = [parent for parent in self.folder.parents if not os.path.exists(parent)]
        try:
            self.folder.mkdir(parents=True)
        except FileExistsError:
            raise self._in_use() from None  # another run created it after this one looked
        self._take_lock()
        (self.folder / KEY_FILE).write_text(json.dumps(self._key, indent=1), "utf-8")
        self.continues = True

    def remove(self) -> None:
        """Delete a folder that this run has locked, and the parents that it created."""
        if self._owned:
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in self._made:
                with contextlib.suppress(OSError):  # something else is in it by now
                    parent.rmdir()
        self.close()

    def close(self) -> None:
        """Release the folder and leave it for a later run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._owned = False

    def _take_lock(self) -> None:
        try:
            self._lock = lock_folder(self.folder)
        except BlockingIOError:
            raise self._in_use() from None
        self._owned = True

    def _in_use(self) -> CheckpointError:
        return CheckpointError(
            f"another run is writing {self._out} (its unfinished work {self.folder} is in use)",
            hint="wait for it, or choose another output folder",
        )


def _differences(stored: Any, now: Any, path: str = "") -> Iterator[str]:
    """Describe each value that differs between two keys."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*stored, *now]):
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(stored.get(key), now.get(key), below)
    elif stored != now:
        digests = all(isinstance(v, str) and len(v) == DIGEST_LENGTH for v in (stored, now))
        change = "its content has changed" if digests else f"{stored} then, {now} now"
        yield f"{path or 'the unfinished work'}: {change}"


# --- states of a training run ---------------------------------------------------------------------

COMPLETE: Final = "complete"
STATES_FORMAT: Final = 3  # raised when older states can no longer be used
_PREFIX: Final = "checkpoint-"


class SavedStates:
    """Saved states of a training run, in a hidden folder next to OUT, for the next run.

    The trainer writes each state into its own folder, `checkpoint-STEP`. A state counts once it
    contains `complete`, the list of its files with their sizes. `folder` exists until `close`.
    """

    def __init__(self, out: Path, key: Mapping[str, Any], *, replace: bool = False) -> None:
        """Open the states of this run; those of another one are refused, or replaced."""
        self.finished = False  # OUT exists: no state is needed any more
        full = {"format": STATES_FORMAT, **key}
        self._place = WorkFolder(out, saved_path(out), full, replace=replace)
        self.folder = self._place.folder
        with writing(self.folder):
            if self._place.continues and self.latest() is not None:
                self.prune()
            else:
                self._place.remove()
                self._place.create()

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
    """Mark a state complete, after all of its files were written."""
    (state / COMPLETE).write_text(json.dumps(_sizes(state)), "utf-8")


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
