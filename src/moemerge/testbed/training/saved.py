"""What a killed training leaves behind, so that it can go on and end with the same bytes.

A hidden folder beside OUT (`.OUT.training`): `key.json` tells what was being trained, each stack of
models has a file of tensors, which is replaced as a whole while the stack trains.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint.output import writing
from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.unfinished import saved_path

KEY_FILE = "key.json"
# Between two savings of a stack that is training: little is lost, and little time spent.
SAVE_SECONDS = 30.0


class Saved:
    """The folder of one training."""

    def __init__(self, out: Path, key: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = saved_path(out)
        self._last = time.monotonic()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder, out)
        try:
            stored = _read_key(self.folder)
            if resume and stored is not None:
                _compare(stored, dict(key), out)
                return
            with writing(self.folder):
                for path in self.folder.iterdir():
                    path.unlink()
                (self.folder / KEY_FILE).write_text(json.dumps(key, indent=1))
        except BaseException:
            self.close()
            raise

    def load(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a stack as they were last saved, if they were."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            return None
        try:
            found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}", hint="start anew without --resume"
            ) from error
        return found

    def save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        path = self.folder / f"{name}.pt"
        with writing(path):
            torch.save(dict(tensors), path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._last >= SAVE_SECONDS

    def remove(self) -> None:
        """All is done: nothing needs to be kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Leave it for a later run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Path, out: Path) -> int | None:
    """Held as long as the training runs; None where the file system knows no locks."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise CheckpointError(
            f"another training is writing {out} ({folder} is in use)",
            hint="wait for it, or choose another output folder",
        ) from None
    except OSError:
        os.close(fd)
        return None
    return fd


def _read_key(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / KEY_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return found


def _compare(stored: dict[str, Any], now: dict[str, Any], out: Path) -> None:
    now = json.loads(json.dumps(now))
    unlike = [
        f"{name}: {stored.get(name)} then, {now.get(name)} now"
        for name in dict.fromkeys([*stored, *now])
        if stored.get(name) != now.get(name)
    ]
    if unlike:
        raise UsageError(
            f"{out} cannot be resumed: the killed training was another one\n  "
            + "\n  ".join(unlike),
            hint="repeat its settings, or start anew without --resume",
        )
