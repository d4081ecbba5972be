"""Read files of others safely: regular files of bounded size, valid JSON. Write files atomically.

Files may be damaged or hostile. They are refused with a `MoeMergeError` that names the file, not
with an error of a parser.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import select
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from moemerge.errors import CheckpointError, DataError, MoeMergeError
from moemerge.runtime.process import is_alive

# The largest known tokenizer.json has some 40 MB.
MOST_BYTES: Final = 2**30
# Suffixes of text files: JSON lines, packed or not, and tables.
TEXT_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
# The vocabulary of a tokenizer without tokenizer.json, in order of preference.
VOCABULARIES: Final = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "tiktoken.model",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)
PIPE_SECONDS = 20  # to wait for the writer of a pipe

Raises = Callable[..., MoeMergeError]  # an error class: `raises(message, hint=...)`


def open_plain(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises OSError, also for pipes, devices and folders, which would block, never end, or fail
    later.
    """
    fd = _open(path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "it is not a regular file")
    return fd


def open_file_or_pipe(path: Path) -> int:
    """Open a file or a pipe for reading and wait for the pipe's writer, with a time limit."""
    fd = _open(path)
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        waiting = select.poll()
        waiting.register(fd, select.POLLIN | select.POLLHUP)
        if not waiting.poll(1000 * PIPE_SECONDS):
            os.close(fd)
            raise OSError(0, "it is a pipe without a writer")
    os.set_blocking(fd, True)
    return fd


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:
        raise OSError(errno.EINVAL, f"its name cannot be used: {error}") from error


def lock_folder(folder: Path) -> int | None:
    """Lock a folder until the returned descriptor is closed; None if the file system has no locks.

    Raises BlockingIOError if another process has locked it.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        os.close(fd)
        return None
    return fd


def read_file(
    path: Path, hint: str | None = None, raises: Raises = CheckpointError, most: int = MOST_BYTES
) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes."""
    try:
        with open(open_plain(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # `read` allocates what is requested, so the size is bounded first.
            data = file.read(min(size, most) + 1)
    except FileNotFoundError as error:
        raise raises(f"{path} is missing", hint=hint) from error
    except OSError as error:
        raise raises(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    if len(data) > most:
        raise raises(f"{path} has more than {most} bytes, too many for its kind", hint=hint)
    if len(data) != size:
        raise raises(
            f"{path} changed while it was read", hint="wait until it is written, and retry"
        )
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Write a complete file, or leave the one that was there.

    A symbolic link at `path` is replaced; the file it points to stays.
    """
    try:
        remove_stale(path)
        replace_file(path, data)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="check the disk and your permissions there, or choose another place",
        ) from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a temporary file next to `path` and rename it. Raises OSError."""
    partial = hidden_sibling(path, "partial")
    try:
        write_file(partial, data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def open_new(path: Path) -> BinaryIO:
    """Open a file for writing, truncated if it exists, without following a symbolic link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return open(os.open(path, flags, 0o666), "wb")


def write_file(path: Path, data: bytes) -> None:
    """Write a small file. A killed process can leave it incomplete."""
    with open_new(path) as file:
        file.write(data)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write everything, thread-safe. A full disk writes a part and fails at the next attempt."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new names in it survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(out: Path, *parts: str) -> Path:
    """Create the folder `out/parts[0]/...` and return it. Below `out`, links are not followed."""
    folder = out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for part in parts:
            folder = folder / part
            if os.path.islink(folder):
                raise OSError(errno.ELOOP, "it is a symbolic link")
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder {folder} cannot be written: {error.strerror}",
            hint="remove it, or choose another output folder",
        ) from error
    return folder


def remove_stale(target: Path) -> None:
    """Remove temporary files of killed processes next to a file."""
    for path in abandoned(target.parent, hidden_pattern(target, "partial")):
        path.unlink(missing_ok=True)


def hidden_sibling(target: Path, kind: str) -> Path:
    """Return a path next to a file or folder that later runs recognise by `hidden_pattern`."""
    return target.parent / f".{target.name}.{kind}-{os.getpid()}-{secrets.token_hex(4)}"


def hidden_pattern(target: Path, kind: str) -> str:
    return rf"\.{re.escape(target.name)}\.{kind}-(\d+)-[0-9a-f]{{8}}"


def abandoned(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield what killed processes left: names that match, where group 1 is the process's id."""
    for path in folder.iterdir():
        match = re.fullmatch(pattern, path.name)
        if match is not None and not is_alive(int(match[1])):
            yield path


def file_digest(path: Path) -> str | None:
    """Return the digest of a file's content; None if it cannot be read."""
    try:
        with open(open_plain(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def read_utf8(path: Path, hint: str | None = None, raises: Raises = CheckpointError) -> str:
    """Return the content of a UTF-8 file."""
    try:
        return read_file(path, hint, raises).decode("utf-8")
    except UnicodeDecodeError as error:
        raise raises(f"{path} is not UTF-8 text (byte {error.start})", hint=hint) from error


def read_object(
    path: Path, hint: str | None = None, raises: Raises = CheckpointError
) -> dict[str, Any]:
    """Read a JSON file that must contain an object."""
    return parse_object(read_utf8(path, hint, raises), str(path), hint, raises)


def parse_object(
    text: str | bytes, where: str, hint: str | None = None, raises: Raises = CheckpointError
) -> dict[str, Any]:
    """Parse JSON text that must contain an object."""
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise raises(f"{where} is not valid JSON: {reason}", hint=hint) from error
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise raises(f"{where} holds a JSON {kind}, expected an object", hint=hint)
    return value
