"""Read one safetensors file with `pread`.

The whole header is checked before a tensor is read. Reads do not use mmap: every page read from a
memory map counts as resident memory, so a merge would appear to hold all its inputs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moemerge.checkpoint.tensors import RowRange, TensorInfo, as_bytes
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import Dtype
from moemerge.runtime.files import open_plain, write_whole
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_OF: Final = {dtype.label: dtype for dtype in Dtype if dtype.label}
LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library
HEADER_ALIGNMENT: Final = 8
METADATA: Final = "__metadata__"
REPLACE_FILE: Final = "the file is damaged or was not fully downloaded; fetch it again"


@dataclass(frozen=True, eq=False)
class FileHeader:
    """The checked header of a file, with its tensors in the order of their bytes."""

    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]  # from the start of the file
    metadata: Mapping[str, str]


class SafetensorsFile:
    """An open file. Reading is thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open(path)
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            self.size = os.fstat(self._fd).st_size
            self.header = read_header(self._fd, self.size, path)
        except BaseException:
            self.close()
            raise
        self.tensors, self.metadata = self.header.tensors, self.header.metadata

    def close(self) -> None:
        self._closer()

    def read(self, name: str, rows: RowRange | None = None, out: Tensor | None = None) -> Tensor:
        """Read a tensor or a range of its leading-axis rows, into new memory or into `out`."""
        info = self.tensors[name]
        shape = info.block_shape(rows)
        if out is None:
            out = torch.empty(shape, dtype=info.dtype.torch)
        elif tuple(out.shape) != shape or out.dtype != info.dtype.torch or not out.is_contiguous():
            raise CheckpointError(
                f"a buffer of {list(out.shape)} {out.dtype} was given for {name!r}, "
                f"which is {list(shape)} {info.dtype} and contiguous"
            )
        offset = self.header.offsets[name] + (rows[0] * info.row_bytes if rows else 0)
        self._fill(as_bytes(out), offset, name)
        return out

    def read_elements(self, name: str, start: int, out: memoryview) -> None:
        """Fill the bytes `out` with the tensor's elements from `start` on."""
        offset = self.header.offsets[name] + start * self.tensors[name].dtype.itemsize
        self._fill(out, offset, name)

    def prefetch(self, name: str, rows: RowRange | None = None) -> None:
        """Advise the system that a tensor will be read soon. Does not wait."""
        info = self.tensors[name]
        first, stop = rows if rows is not None else (0, info.rows)
        begin = self.header.offsets[name] + info.row_bytes * first
        if hasattr(os, "posix_fadvise") and self._closer.alive:
            length = info.row_bytes * (stop - first)
            os.posix_fadvise(self._fd, begin, length, os.POSIX_FADV_WILLNEED)

    def sample(self, name: str, limit: int) -> bytes:
        """Return at most `limit` bytes from the middle of a tensor."""
        nbytes = self.tensors[name].nbytes
        count = min(limit, nbytes)
        buffer = bytearray(count)
        self._fill(memoryview(buffer), self.header.offsets[name] + (nbytes - count) // 2, name)
        return bytes(buffer)

    def _fill(self, buffer: memoryview, offset: int, name: str) -> None:
        if not self._closer.alive:
            raise CheckpointError(f"{self.path} was closed before {name!r} was read")
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} cannot be read: {error.strerror}",
                    hint="the disk or network share fails; copy the model elsewhere and try again",
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} ends after {done} of {len(buffer)} bytes; "
                    "the file was cut short after it was opened",
                    hint="do not change a model while it is read",
                )
            done += count


def _open(path: Path) -> int:
    try:
        return open_plain(path)
    except OSError as error:
        hint = {
            errno.ENOENT: "fetch the missing file, or point at the right folder",
            errno.EACCES: "change its permissions so that you can read it",
            errno.EMFILE: "too many files are open at once; raise the limit, e.g. ulimit -n 65536",
        }.get(error.errno or 0)
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}", hint=hint) from error


# Headers in use. Fine-tunes of one model often have equal headers, which are then read once.
_HEADERS: weakref.WeakValueDictionary[tuple[bytes, int], FileHeader] = weakref.WeakValueDictionary()


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}", hint=REPLACE_FILE)


def read_header(fd: int, size: int, path: Path) -> FileHeader:
    """Parse and check the header of an open file of `size` bytes."""
    raw = os.pread(fd, _header_length(fd, size, path), LENGTH_BYTES)
    key = hashlib.sha256(raw).digest(), size
    header = _HEADERS.get(key)
    if header is None:
        header = _HEADERS[key] = _parse_header(raw, size, path)
    return header


def _header_length(fd: int, size: int, path: Path) -> int:
    if size < LENGTH_BYTES:
        raise _damaged(path, f"it has {size} bytes, too few for a safetensors header")
    (length,) = struct.unpack("<Q", os.pread(fd, LENGTH_BYTES, 0))
    if length > size - LENGTH_BYTES or length > MAX_HEADER_BYTES:
        raise _damaged(
            path,
            f"the header claims {length} bytes, but {size - LENGTH_BYTES} follow and at most "
            f"{MAX_HEADER_BYTES} are allowed; it is truncated or not a safetensors file (a Git LFS "
            "pointer, perhaps)",
        )
    return int(length)


def _parse_header(raw: bytes, size: int, path: Path) -> FileHeader:
    """Parse a header. Refuse tensors that do not cover the data exactly: no gap, no overlap."""
    try:
        header = json.loads(raw.decode("utf-8"))
        metadata = header.pop(METADATA, {})
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        raise _damaged(path, f"the header is not that of a safetensors file: {error}") from error
    start = expected = LENGTH_BYTES + len(raw)
    known: dict[tuple[str | int, ...], TensorInfo] = {}  # thousands of tensors share a few shapes
    tensors: dict[str, TensorInfo] = {}
    offsets: dict[str, int] = {}
    for name, entry in entries:
        try:
            label, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            like = known.get((label, *shape))
            if like is None and label in DTYPE_OF and min(shape, default=0) >= 0:
                dtype = DTYPE_OF[label]
                stored = [*shape[:-1], shape[-1] // dtype.pack] if shape else []
                like = known[label, *shape] = TensorInfo.of(name, dtype, stored)
            wrong = like is None or end - begin != like.nbytes
        except (LookupError, TypeError, ValueError):
            like, wrong = None, True
        if like is None or wrong:
            raise _damaged(
                path,
                f"tensor {name!r} has the header entry {str(entry)[:120]}, expected a dtype "
                f"({', '.join(DTYPE_OF)}), a shape, and data_offsets that hold it",
            )
        if start + begin != expected:
            raise _damaged(
                path,
                f"tensor {name!r} begins at byte {begin} of the data, expected {expected - start}",
            )
        expected = start + end
        tensors[name] = TensorInfo(name, like.dtype, like.shape, like.nbytes)
        offsets[name] = start + begin
    if expected != size:
        raise _damaged(
            path,
            f"its tensors end at byte {expected}, but the file has {size}; it is truncated, or "
            "was changed",
        )
    return FileHeader(tensors, offsets, metadata)


def build_header(
    infos: Sequence[TensorInfo], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return a header (with its length) for `infos`, and each tensor's offset in the file.

    Wider dtypes come first, so that every tensor is aligned to its own element size.
    """
    ordered = sorted(infos, key=lambda info: -info.dtype.itemsize)
    header: dict[str, Any] = {METADATA: {"format": "pt", **(metadata or {})}}
    begins: dict[str, int] = {}
    end = 0
    for info in ordered:
        begins[info.name] = end
        end += info.nbytes
        header[info.name] = {
            "dtype": dtype_label(info),
            "shape": info.stored_shape,
            "data_offsets": [begins[info.name], end],
        }
    data = _with_length(header)
    return data, {n: len(data) + b for n, b in begins.items()}


def add_metadata(path: Path, metadata: Mapping[str, str]) -> None:
    """Add metadata to a file. Its tensors, which must fit into memory, are unchanged."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
        header = json.loads(file.read(length))
        header[METADATA] = {**header.get(METADATA, {}), **metadata}
        data = _with_length(header) + file.read()
    write_whole(path, data)


def _with_length(header: Mapping[str, Any]) -> bytes:
    """Return an encoded header, with its length before it."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def dtype_label(info: TensorInfo) -> str:
    """Return safetensors' name of the dtype. Refuse a dtype that it cannot store."""
    if not info.dtype.label:
        raise CheckpointError(
            f"tensor {info.name!r} has dtype {info.dtype}, which safetensors cannot store",
            hint=f"it can store {', '.join(map(str, DTYPE_OF.values()))}",
        )
    return info.dtype.label
