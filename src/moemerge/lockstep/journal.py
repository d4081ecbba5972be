"""Finished work on disk, so that a killed run can go on and end with the same bytes.

The journal is a hidden folder next to OUT (`.OUT.journal`). `key.json` says what was done with
what; each finished entry (a router, a layer) adds `NNNN.bin` (its tensors' bytes) and then
`NNNN.json` (their names, its row of the report, and a digest of all of it, of the bytes and of the
run that it belongs to). An entry counts once its JSON is there and the digest agrees. Tensors of
entries are read back when they are asked for.
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
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint.output import sync_folder, write_file, writing
from moemerge.checkpoint.tensors import as_bytes
from moemerge.config.documents import JournalDocument, parse_document
from moemerge.errors import CheckpointError, MoeMergeError, UsageError
from moemerge.runtime.dtypes import dtype_name, parse_dtype
from moemerge.runtime.files import lock_folder, open_plain, read_object
from moemerge.runtime.journals import journal_path

KEY_FILE = "key.json"
FORMAT = 3  # of the files; raised when an older journal can no longer be read


@dataclass(frozen=True)
class Entry:
    """Finished work: its tensors as they will be stored, and its row of the report."""

    name: str  # of what was finished: a router's tensor, a layer
    tensors: Mapping[str, Tensor]  # by name on disk
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


class Journal:
    """Open with `Journal.open`; `entries` are what is finished, in order."""

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
        if journal.folder.is_symlink() or (journal.folder.exists() and not journal.folder.is_dir()):
            raise CheckpointError(
                f"{journal.folder} is no folder of ours, and a journal would be written there",
                hint="remove it, or choose another output folder",
            )
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
        headers = [
            {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            for name, tensor in entry.tensors.items()
        ]
        with writing(self.folder):
            if not self._begun:
                self._begin()
            binary = self.folder / f"{stem}.bin"
            content = {"entry": entry.name, "tensors": headers, "row": entry.row}
            content["digest"] = self._digest(
                content, len(self.entries), _write_tensors(binary, entry.tensors.values())
            )
            whole = self.folder / f"{stem}.json"
            write_file(whole.with_suffix(".tmp"), json.dumps(content).encode())
            os.rename(whole.with_suffix(".tmp"), whole)
            sync_folder(self.folder)
        self.entries.append(replace(entry, tensors=StoredTensors(binary, headers)))

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
        try:
            self._lock = lock_folder(self.folder)
        except BlockingIOError:
            raise self._in_use(what) from None

    def _in_use(self, what: Path) -> CheckpointError:
        return CheckpointError(
            f"another run is writing {what} (its journal {self.folder} is in use)",
            hint="wait for it, or choose another output folder",
        )

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _resume(self, out: Path) -> None:
        try:
            stored: Any = read_object(self.folder / KEY_FILE)
        except CheckpointError:
            stored = None  # it died before it had begun
        differences = list(_differences(stored, _plain(self._key)))
        if differences:
            raise UsageError(
                f"{out} cannot be resumed: the killed run was another one\n  "
                + "\n  ".join(differences),
                hint="repeat its settings and inputs, or start anew without `resume`",
            )
        self._begun = True
        self.entries = list(self._read_entries())

    def _read_entries(self) -> Iterator[Entry]:
        """Whole entries from the first on; what was being written when the run died ends them."""
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
        """Of an entry, its place, its tensors' bytes, and all that the run depends on."""
        kept = {name: content[name] for name in ("entry", "tensors", "row")}
        text = json.dumps([_plain(self._key), number, kept, data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _write_tensors(file: Path, tensors: Iterable[Tensor]) -> str:
    """One after the other, durably; gives the digest of all bytes."""
    digest = hashlib.sha256()
    with file.open("wb") as stream:
        for tensor in tensors:
            data = as_bytes(tensor.contiguous())
            stream.write(data)
            digest.update(data)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """As it looks after a way through JSON."""
    return json.loads(json.dumps(value))


def _differences(stored: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*stored, *now]):
            below = f"{path}.{key}" if path else str(key)
            yield from _differences(stored.get(key), now.get(key), below)
    elif stored != now:
        digests = all(isinstance(v, str) and len(v) == hashlib.sha256().digest_size * 2
                      for v in (stored, now))  # fmt: skip
        change = "its content has changed" if digests else f"{stored} then, {now} now"
        yield f"{path or 'the journal'}: {change}"
