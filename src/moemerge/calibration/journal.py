"""Finished layers on disk, so that a killed run can go on and end with the same bytes.

The journal is a hidden folder beside OUT (`.OUT.journal`). `key.json` tells what was calibrated
with what; each router adds `NNNN.bin` (its tensors' bytes) and then `NNNN.json` (its row of the
report, and a digest of the bytes). An entry counts once its JSON is there and the digest agrees.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint.output import sync_folder, write_file, writing
from moemerge.checkpoint.tensors import as_bytes
from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.devices import dtype_name, parse_dtype
from moemerge.runtime.unfinished import journal_path

KEY_FILE = "key.json"
FORMAT = 1  # of the files; raised when an older journal can no longer be read


@dataclass(frozen=True)
class Entry:
    """A solved router: its tensors as stored, and its row of the report."""

    router: str  # name on disk
    weight: Tensor  # (all rows, d)
    bias: Tensor | None
    row: dict[str, Any]


class Journal:
    """Open with `Journal.open`; `entries` are the finished routers in order."""

    def __init__(self, folder: Path, key: Mapping[str, Any], entries: list[Entry]) -> None:
        self.folder = folder
        self.entries = entries
        self._key = key
        self._lock: int | None = None
        self._made: list[Path] = []
        self._begun = False

    @classmethod
    def open(cls, out: Path, key: Mapping[str, Any], *, resume: bool) -> Journal:
        """The journal of OUT. A leftover one is continued (`resume`) or replaced.

        `key` is plain JSON data. Nothing is written before the first entry is.
        """
        key = {"format": FORMAT, **key}
        journal = cls(journal_path(out), key, [])
        if not journal.folder.exists():
            return journal
        journal._take_lock(out)
        try:
            if resume:
                journal._resume(out)
            else:
                shutil.rmtree(journal.folder, ignore_errors=True)
                journal._unlock()
        except BaseException:
            journal._unlock()
            raise
        return journal

    def add(self, entry: Entry) -> None:
        """Write an entry so that it outlives a crash."""
        stem = f"{len(self.entries):04d}"
        parts = [entry.weight] if entry.bias is None else [entry.weight, entry.bias]
        data = b"".join(bytes(as_bytes(part.contiguous())) for part in parts)
        content = {
            "router": entry.router,
            "tensors": [{"dtype": dtype_name(p.dtype), "shape": list(p.shape)} for p in parts],
            "sha256": hashlib.sha256(data).hexdigest(),
            "row": entry.row,
        }
        with writing(self.folder):
            if not self._begun:
                self._begin()
            write_file(self.folder / f"{stem}.bin", data)
            whole = self.folder / f"{stem}.json"
            write_file(whole.with_suffix(".tmp"), json.dumps(content).encode())
            os.rename(whole.with_suffix(".tmp"), whole)
            sync_folder(self.folder)
        self.entries.append(entry)

    def remove(self) -> None:
        """The journal is no longer needed."""
        if self._begun:
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in reversed(self._made):
                with contextlib.suppress(OSError):  # somebody else uses it by now
                    parent.rmdir()
        self.close()

    def close(self) -> None:
        """Leave it for a later run."""
        self._unlock()
        self._begun = False

    # --- inside ---

    def _begin(self) -> None:
        for parent in reversed([p for p in self.folder.parents if not p.exists()]):
            parent.mkdir(exist_ok=True)
            self._made.append(parent)
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise self._in_use(self.folder) from None  # it came into being since `open` looked
        self._begun = True
        self._take_lock(self.folder)
        write_file(self.folder / KEY_FILE, json.dumps(self._key, indent=1).encode())

    def _take_lock(self, what: Path) -> None:
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise self._in_use(what) from None
        except OSError:  # a file system without locks: nothing can be told, so nothing is refused
            os.close(fd)
            return
        self._lock = fd

    def _in_use(self, what: Path) -> CheckpointError:
        return CheckpointError(
            f"another calibration is writing {what} (its journal {self.folder} is in use)",
            hint="wait for it, or choose another output folder",
        )

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _resume(self, out: Path) -> None:
        stored = _read_json(self.folder / KEY_FILE)
        differences = list(_differences(stored, _plain(self._key)))
        if differences:
            raise UsageError(
                f"{out} cannot be resumed: the killed run was another one\n  "
                + "\n  ".join(differences),
                hint="repeat its settings and inputs, or start anew without --resume",
            )
        self._begun = True
        self.entries = list(self._read_entries())

    def _read_entries(self) -> Iterator[Entry]:
        """Whole entries from the first on; what was being written when the run died ends them."""
        for number in range(len(list(self.folder.iterdir()))):
            content = _read_json(self.folder / f"{number:04d}.json")
            binary = self.folder / f"{number:04d}.bin"
            if content is None or not binary.exists():
                return
            data = binary.read_bytes()
            if hashlib.sha256(data).hexdigest() != content["sha256"]:
                return
            parts = _tensors(data, content["tensors"])
            bias = parts[1] if len(parts) > 1 else None
            yield Entry(content["router"], parts[0], bias, content["row"])


def _tensors(data: bytes, headers: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    found, offset = [], 0
    for header in headers:
        dtype, shape = parse_dtype(header["dtype"]), torch.Size(header["shape"])
        nbytes = shape.numel() * dtype.itemsize
        chunk = bytearray(data[offset : offset + nbytes])  # writable, as torch wants it
        found.append(torch.frombuffer(chunk, dtype=dtype).reshape(shape))
        offset += nbytes
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def _plain(value: Any) -> Any:
    """As it looks after a way through JSON."""
    return json.loads(json.dumps(value))


def _differences(stored: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*stored, *now]):
            place = f"{path}.{key}" if path else str(key)
            yield from _differences(stored.get(key), now.get(key), place)
    elif stored != now:
        digests = all(isinstance(v, str) and len(v) == hashlib.sha256().digest_size * 2
                      for v in (stored, now))  # fmt: skip
        told = "its content has changed" if digests else f"{stored} then, {now} now"
        yield f"{path or 'the journal'}: {told}"
