"""The store of tensors: finished work in a hidden folder next to OUT, for the next run.

`JournalFolder` is the folder: `key.json` states what its content depends on, and a lock keeps other
runs away. `Journal` adds entries to it. An entry (a router, a layer) is `NNNN.bin`, the bytes of
its tensors, and `NNNN.json`: the tensors' names, a row of the report, and a digest. The digest
covers both files, the entry's number and the key. Entries count up to the first one whose files
are missing or whose digest differs.

Both files of an entry, and the folder's own name, are synced to disk before `Journal.add` returns:
a finished entry survives a power loss. Tensors of entries are read back when they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moemerge.checkpoint.output import writing
from moemerge.checkpoint.tensors import as_bytes
from moemerge.config.documents import JournalDocument, parse_document
from moemerge.errors import CheckpointError, MoeMergeError, UsageError
from moemerge.runtime.dtypes import dtype_name, parse_dtype
from moemerge.runtime.files import (
    lock_folder,
    open_new,
    open_plain,
    read_object,
    replace_file,
    sync_folder,
)
from moemerge.runtime.journals import journal_path, saved_path

KEY_FILE = "key.json"
START_ANEW = "the journal is damaged; remove it, or start anew with `overwrite=True`"
FORMAT = 3  # raised when older journals can no longer be read


@dataclass(frozen=True)
class Entry:
    """A finished router or layer: its tensors in stored form, and its row of the report."""

    name: str  # a router's tensor, or a layer
    tensors: Mapping[str, Tensor]  # by their names in the checkpoint
    row: dict[str, Any]


class StoredTensors(Mapping[str, Tensor]):
    """An entry's tensors, read from its file one by one."""

    def __init__(self, file: Path, headers: Sequence[Mapping[str, Any]]) -> None:
        self._file = file
        self._places: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        offset = 0
        for header in headers:
            dtype, shape = parse_dtype(header["dtype"]).torch, torch.Size(header["shape"])
            self._places[header["name"]] = (offset, dtype, shape)
            offset += shape.numel() * dtype.itemsize

    def __getitem__(self, name: str) -> Tensor:
        offset, dtype, shape = self._places[name]
        with self._file.open("rb") as stream:
            stream.seek(offset)
            data = bytearray(stream.read(shape.numel() * dtype.itemsize))  # writable, for torch
        return torch.frombuffer(data, dtype=dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class JournalFolder:
    """A hidden folder next to OUT for the unfinished work of one run at a time."""

    def __init__(self, out: Path, folder: Path, key: Mapping[str, Any]) -> None:
        """Refuse a link or a file in the folder's place. `key` is plain JSON data."""
        self.folder = folder
        self.key = _plain(key)
        self._out = out
        self.locked = False  # by this run
        self._descriptor: int | None = None  # None on a file system without locks
        self._made: list[Path] = []  # parents of OUT that did not exist
        if os.path.islink(folder) or (os.path.exists(folder) and not os.path.isdir(folder)):
            raise CheckpointError(
                f"{folder} is not a moemerge folder, and unfinished work would be stored there",
                hint="remove it, or choose another output folder",
            )

    def lock(self) -> bool:
        """Lock an existing folder, and return whether it exists."""
        if not os.path.exists(self.folder):
            return False
        self._take_lock()
        return True

    def create(self) -> None:
        """Create the folder, locked and with its key, in place of one that this run has locked."""
        if self.locked:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.close()
        for parent in reversed([p for p in self.folder.parents if not os.path.exists(p)]):
            parent.mkdir(exist_ok=True)
            self._made.append(parent)
        try:
            self.folder.mkdir()
        except FileExistsError:
            raise self._in_use() from None  # another run created it after this one looked
        self._take_lock()
        replace_file(self.folder / KEY_FILE, json.dumps(self.key, indent=1).encode())
        for parent in (self.folder.parent, *(made.parent for made in self._made)):
            sync_folder(parent)

    def continues(self, *, replace: bool) -> bool:
        """Return whether a locked folder has work of this run, as far as its key tells.

        With `replace`, work of another run does not count; otherwise it is refused.
        """
        path = self.folder / KEY_FILE
        if not os.path.lexists(path):
            return False  # killed before the key was written
        try:
            differences = list(_differences(read_object(path, START_ANEW), self.key))
        except CheckpointError:
            if replace:
                return False
            raise
        if differences and not replace:
            raise UsageError(
                f"{self.folder} has the unfinished work of another run\n  "
                + "\n  ".join(differences),
                hint="to continue it, repeat its settings and inputs; to start anew, use "
                "`overwrite=True`",
            )
        return not differences

    def remove(self) -> None:
        """Delete a folder that this run has locked, and the parents that it created."""
        if self.locked:
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in reversed(self._made):
                with contextlib.suppress(OSError):  # something else is in it by now
                    parent.rmdir()
        self.close()

    def close(self) -> None:
        """Release the folder and leave it for a later run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.locked = False

    def _take_lock(self) -> None:
        try:
            self._descriptor = lock_folder(self.folder)
        except BlockingIOError:
            raise self._in_use() from None
        self.locked = True

    def _in_use(self) -> CheckpointError:
        return CheckpointError(
            f"another run is writing {self._out} (its journal {self.folder} is in use)",
            hint="wait for it, or choose another output folder",
        )


class Journal(JournalFolder):
    """Entries of finished work, in order. Nothing is written before the first one is added."""

    def __init__(self, out: Path, key: Mapping[str, Any], *, replace: bool = False) -> None:
        """Open the journal of OUT. An existing one of this run is continued.

        One of another run is refused, or replaced if `replace`. `key` is plain JSON data.
        """
        super().__init__(out, journal_path(out), {"format": FORMAT, **key})
        self.entries: list[Entry] = []
        if not self.lock():
            return
        try:
            if self.continues(replace=replace):
                self.entries = list(self._read_entries())
            else:
                self.remove()
        except BaseException:
            self.close()
            raise

    def add(self, entry: Entry) -> None:
        """Write an entry to disk."""
        stem = f"{len(self.entries):04d}"
        headers = [
            {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in entry.tensors.items()
        ]
        with writing(self.folder):
            if not self.locked:
                self.create()
            binary = self.folder / f"{stem}.bin"
            content = {"entry": entry.name, "tensors": headers, "row": entry.row}
            content["digest"] = self._digest(
                content, len(self.entries), _write_tensors(binary, entry.tensors.values())
            )
            # Syncs the folder as well, and with it the name of the binary file.
            replace_file(self.folder / f"{stem}.json", json.dumps(content).encode())
        self.entries.append(replace(entry, tensors=StoredTensors(binary, headers)))

    def _read_entries(self) -> Iterator[Entry]:
        """Yield entries up to the first one that is incomplete or damaged."""
        for number in range(len(list(self.folder.iterdir()))):
            binary = self.folder / f"{number:04d}.bin"
            try:
                content = read_object(self.folder / f"{number:04d}.json")
                document = parse_document(JournalDocument, content, str(self.folder))
                with open(open_plain(binary), "rb") as stream:
                    data = hashlib.file_digest(stream, "sha256").hexdigest()
            except (MoeMergeError, OSError):
                return
            if self._digest(content, number, data) != document.digest:
                return
            headers = [tensor.model_dump() for tensor in document.tensors]
            yield Entry(document.entry, StoredTensors(binary, headers), document.row)

    def _digest(self, content: Mapping[str, Any], number: int, data: str) -> str:
        """Return the digest of an entry, its number, its tensors' digest and the key."""
        kept = {name: content[name] for name in ("entry", "tensors", "row")}
        text = json.dumps([self.key, number, kept, data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _write_tensors(file: Path, tensors: Iterable[Tensor]) -> str:
    """Write tensors one after the other, sync them, and return the digest of all bytes."""
    digest = hashlib.sha256()
    with open_new(file) as stream:
        for tensor in tensors:
            data = as_bytes(tensor.contiguous())
            stream.write(data)
            digest.update(data)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Return the value as JSON reads it back."""
    return json.loads(json.dumps(value))


def _differences(stored: Any, now: Any, path: str = "") -> Iterator[str]:
    """Describe each value that differs between two keys."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*stored, *now]):
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(stored.get(key), now.get(key), below)
    elif stored != now:
        digests = all(isinstance(v, str) and len(v) == hashlib.sha256().digest_size * 2
                      for v in (stored, now))  # fmt: skip
        change = "its content has changed" if digests else f"{stored} then, {now} now"
        yield f"{path or 'the journal'}: {change}"


# --- states of a training run ---------------------------------------------------------------------

COMPLETE: Final = "complete"
STATES_FORMAT: Final = 2  # raised when older states can no longer be used
_PREFIX: Final = "checkpoint-"


class SavedStates:
    """Saved states of a training run, in a hidden folder next to OUT, for the next run.

    The trainer writes each state into its own folder, `checkpoint-STEP`. A state counts once it
    contains `complete`, the list of its files with their sizes. The files are synced to disk
    before. `folder` exists until `close`.
    """

    def __init__(self, out: Path, key: Mapping[str, Any], *, replace: bool = False) -> None:
        """Open the states of this run; those of another one are refused, or replaced."""
        self.finished = False  # OUT exists: no state is needed any more
        self._place = JournalFolder(out, saved_path(out), {"format": STATES_FORMAT, **key})
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
