"""Saved states of a training, in a hidden folder beside OUT, from which `resume` goes on.

The trainer writes each into a folder of its own, `checkpoint-STEP`; one counts once the file
`complete`, which comes last, is in it. `key.json` says what they are states of.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moemerge.checkpoint.output import write_file, writing
from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.files import read_object
from moemerge.runtime.journals import saved_path

COMPLETE: Final = "complete"
KEY_FILE: Final = "key.json"
_PREFIX: Final = "checkpoint-"


class SavedStates:
    """The folder of one run; nobody else uses it meanwhile."""

    def __init__(self, out: Path, key: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = saved_path(out)
        self.finished = False  # OUT is there: no state is needed any more
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise CheckpointError(
                f"{self.folder} is no folder of ours, and states would be saved there",
                hint="remove it, or choose another output folder",
            )
        target = self.folder.parent
        self._made = [p for p in (target, *target.parents) if not p.exists()]
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked(out)
            try:
                if resume and self.latest() is not None:
                    self._check(key)
                    self._prune()
                else:
                    self._clear()
                    write_file(self.folder / KEY_FILE, json.dumps(dict(key)).encode())
            except BaseException:
                os.close(self._lock)
                raise

    def _locked(self, out: Path) -> int:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UsageError(
                f"another run is training {out} now", hint="wait for it, or choose another output"
            ) from None
        return fd

    def _check(self, key: Mapping[str, Any]) -> None:
        known = read_object(self.folder / KEY_FILE)
        wanted = json.loads(json.dumps(dict(key)))
        differ = [name for name in wanted if known.get(name) != wanted[name]]
        if differ:
            raise UsageError(
                f"{self.folder} holds states of another training: its {', '.join(differ)} "
                "are not these",
                hint="repeat the command that was interrupted, or start anew without `resume`",
            )

    def latest(self) -> Path | None:
        """The last state that was saved whole."""
        whole = [path for path in self._all() if (path / COMPLETE).exists()]
        return max(whole, key=_step, default=None)

    def _all(self) -> list[Path]:
        return [p for p in self.folder.glob(f"{_PREFIX}*") if p.name[len(_PREFIX) :].isdigit()]

    def _prune(self) -> None:
        """Nothing stays but the last whole state."""
        last = self.latest()
        for path in self._all():
            if path != last:
                shutil.rmtree(path, ignore_errors=True)

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def close(self, *, keep: bool) -> None:
        """The run has ended; `keep` leaves the last whole state, if there is one."""
        if keep and self.latest() is not None:
            self._prune()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in self._made:
                with contextlib.suppress(OSError):  # somebody else uses it by now
                    parent.rmdir()
        os.close(self._lock)


def _step(path: Path) -> int:
    return int(path.name[len(_PREFIX) :])
