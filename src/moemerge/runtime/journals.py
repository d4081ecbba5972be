"""The store of JSON lines, and the paths of the files that unfinished work is stored in.

`LineStore` holds completions, judgements and the measured cells of a study. Its counterpart for
tensors is `moemerge.repairs.output`. Paths are defined here, apart from the jobs, so
that the message about an interrupted run can name them without importing the job.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Self

from moemerge.errors import DataError
from moemerge.runtime.files import parse_object


def _sibling(out: Path, what: str) -> Path:
    out = Path(os.path.realpath(out))
    return out.with_name(f".{out.name}.{what}")


journal_path = partial(_sibling, what="journal")  # finished layers of a calibration or refit
saved_path = partial(_sibling, what="training")  # saved states of a training run
completions_path = partial(_sibling, what="completions")  # that calibration text is made of
judgements_path = partial(_sibling, what="judgements")  # of these completions


# --- lines ----------------------------------------------------------------------------------------

DIGEST = "digest"
RESTART_HINT = "remove it, or start anew with `overwrite=True`"


class OtherRunError(DataError):
    """The file belongs to another run, according to its first line."""

    def __init__(self, path: Path, stored: Mapping[str, Any]) -> None:
        super().__init__(
            f"{path} is of another run, or was written by another version",
            hint="remove it, or choose another output",
        )
        self.stored = stored


class LineStore:
    """An append-only file of JSON objects, one per line, that one process writes at a time.

    The first line, `head`, states what the file belongs to; a file without a head has entries only.
    Every other line contains a digest of itself and of the head. A changed line, or one from
    another file, raises an error. A killed process leaves at most an incomplete last line, which is
    removed when the file is opened again.

    When `add` returns, the line survives the end of the process.

    A symbolic link is never followed. `lines` are the lines that were found, without the head.
    """

    def __init__(
        self,
        path: Path,
        head: Mapping[str, Any] | None,
        *,
        restart: bool = False,
        hint: str = RESTART_HINT,
    ) -> None:
        self.path = path
        self._head = head
        self._file = _open(path)
        try:
            self._lock()
            self.lines = self._recover(hint, restart=restart)
        except BaseException:
            self._file.close()
            raise

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        self._write({**line, DIGEST: line_digest(line, self._head)})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{self.path} is being written by another run",
                hint="wait for it, or give this one another output",
            ) from None
        except OSError:  # a file system without locks: other processes go unnoticed
            return

    def _recover(self, hint: str, *, restart: bool) -> list[dict[str, Any]]:
        """Remove an incomplete last line, write the head of a new file, and return the lines."""
        self._file.seek(0)
        content = b"" if restart else self._file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(complete))
        if complete:
            return _parse_lines(complete, self.path, self._head, hint)
        if self._head is not None:
            self._write(self._head)
        return []

    def _write(self, line: Mapping[str, Any]) -> None:
        # ASCII: a text cut within a character may contain lone surrogates, which UTF-8 cannot hold.
        data = json.dumps(line).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file.fileno(), data) :]
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written: {error.strerror}",
                hint="free some space or raise the limit; the same command then continues",
            ) from error


def _parse_lines(
    content: bytes, path: Path, head: Mapping[str, Any] | None, hint: str
) -> list[dict[str, Any]]:
    lines = []
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        line = parse_object(text, f"{path}: line {number}", hint, DataError)
        if number == 1 and head is not None:
            if _canonical(line) != _canonical(head):
                raise OtherRunError(path, line)
            continue
        # Files without a head were once written without digests.
        stored = line.pop(DIGEST, None)
        if stored != line_digest(line, head) and (head is not None or stored is not None):
            why = f"line {number} is not as it was written"
            raise DataError(f"{path} is damaged: {why}", hint=hint)
        lines.append(line)
    return lines


def line_digest(line: Mapping[str, Any], head: Mapping[str, Any] | None = None) -> str:
    """Return the digest of a line in a file with this head."""
    text = ("" if head is None else _canonical(head)) + _canonical(line)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _canonical(value: Mapping[str, Any]) -> str:
    """Return the same JSON text before the value is written and after it is read."""
    return json.dumps(json.loads(json.dumps(value)), sort_keys=True)


def _open(path: Path) -> IO[bytes]:
    """Open a regular file for reading and appending, without following a symbolic link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(0, "it is not a regular file")
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}",
            hint="remove it, or choose another output",
        ) from error
    return os.fdopen(fd, "ab+")
