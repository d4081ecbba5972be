"""Files that unfinished work waits in, hidden next to the folder or file that it is for.

They are named here, apart from the work itself, so that somebody who interrupts it can be told
without importing it. Most hold JSON objects, one a line, written as they come. Each line carries a
digest of itself and of the file's first line, which says what the file is of: a line that was
changed, or comes from another run's file, is noticed. Half a line at the end, which a killed run
leaves, is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

from moemerge.errors import DataError
from moemerge.runtime.files import parse_object


def journal_path(out: Path) -> Path:
    """Of a calibration's finished routers."""
    return _sibling(out, "journal")


def saved_path(out: Path) -> Path:
    """Of a training's finished steps."""
    return _sibling(out, "training")


def completions_path(out: Path) -> Path:
    """Of completions that calibration text is made of."""
    return _sibling(out, "completions")


def judgements_path(out: Path) -> Path:
    """Of what was decided about these completions."""
    return _sibling(out, "judgements")


def _sibling(out: Path, what: str) -> Path:
    out = Path(os.path.realpath(out))
    return out.with_name(f".{out.name}.{what}")


# --- lines ----------------------------------------------------------------------------------------

DIGEST = "digest"


class OtherRunError(DataError):
    """A file whose first line says that it is of another run."""

    def __init__(self, path: Path, stored: Mapping[str, Any]) -> None:
        super().__init__(
            f"{path} is of another run, or was written by another version",
            hint="remove it, or choose another output",
        )
        self.stored = stored


class LineFile:
    """Open for one process at a time. `lines` are those that were there, without the first."""

    def __init__(self, path: Path, head: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        self._head = _text(head)
        self._file = _open(path)
        try:
            self._lock()
            self._read(head, restart=restart)
        except BaseException:
            self._file.close()
            raise

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line; it is the operating system's when this returns."""
        self._write({**line, DIGEST: line_digest(line, self._head)})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ---

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{self.path} is being written by another run",
                hint="wait for it, or give this one another output",
            ) from None
        except OSError:  # a file system without locks: others cannot be seen
            return

    def _read(self, head: Mapping[str, Any], *, restart: bool) -> None:
        self._file.seek(0)
        content = b"" if restart else self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        if not whole:
            self._write(head)
            return
        first, *others = whole.split(b"\n")[:-1]
        stored = self._parse(first, 1)
        if _text(stored) != self._head:
            raise OtherRunError(self.path, stored)
        for number, text in enumerate(others, start=2):
            line = self._parse(text, number)
            if line.pop(DIGEST, None) != line_digest(line, self._head):
                raise self._damaged(f"line {number} is not as it was written")
            self.lines.append(line)

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"line {number} is not UTF-8") from error
        where = f"{self.path}: line {number}"
        return parse_object(decoded, where, self._hint, DataError, halves=True)

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.path} is damaged: {why}", hint=self._hint)

    @property
    def _hint(self) -> str:
        return "remove it, or start anew with `overwrite=True`"

    def _write(self, line: Mapping[str, Any]) -> None:
        # A text cut within a character may hold halves of it, which JSON can and UTF-8 cannot say.
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()


def line_digest(line: Mapping[str, Any], head: str = "") -> str:
    """Tells a line, of a file that begins with `head`, from every other."""
    return hashlib.sha256((head + _text(line)).encode()).hexdigest()[:32]


def _text(value: Mapping[str, Any]) -> str:
    """The same for what was written and for what was read again."""
    return json.dumps(json.loads(json.dumps(value)), sort_keys=True)


def _open(path: Path) -> IO[bytes]:
    """For reading and appending. A link is not followed: what it leads to is nobody's to write."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(0, "it is no plain file")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}",
            hint="remove it, or choose another output",
        ) from error
    return os.fdopen(fd, "ab+")
