"""Read one safetensors file with `pread`.

The whole header is checked before a tensor is read. Reads do not use mmap: every page read from a
memory map counts as resident memory, so a merge would appear to hold all its inputs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import struct
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moemerge.checkpoint.tensors import RowRange, TensorInfo, as_bytes
from moemerge.errors import CheckpointError
from moemerge.registry import did_you_mean
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
MAX_NAME_LENGTH: Final = 1024
MOST_TENSORS: Final = 250_000  # the largest known models have 210,000, in many files
MOST_ELEMENTS: Final = 2**63 - 1  # torch's limit
_ENTRY: Final = {"dtype", "shape", "data_offsets"}
_INT: Final = {int}
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


def _parse_header(raw: bytes, size: int, path: Path) -> FileHeader:
    if (count := raw.count(b'"data_offsets"')) > MOST_TENSORS:
        raise CheckpointError(
            f"{path} has {count} tensors, at most {MOST_TENSORS} are read from one file",
            hint="save the model in several shards",
        )
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
        if b"\\" in raw:
            json.dumps(header, ensure_ascii=False).encode()  # fails for lone surrogates
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        kind = type(header).__name__
        raise _damaged(path, f"the header is a JSON {kind}, expected an object")
    metadata = header.pop(METADATA, {})
    texts = metadata.values() if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        got = str(metadata)[:80]
        raise _damaged(path, f"{METADATA} must map strings to strings, got {got}")
    start = LENGTH_BYTES + len(raw)
    known: dict[tuple[str | int, ...], TensorInfo] = {}
    entries = [_entry(name, entry, path, known) for name, entry in header.items()]
    entries.sort(key=itemgetter(1, 2))
    _check_coverage(entries, size - start, path)
    return FileHeader(
        {info.name: info for info, _, _ in entries},
        {info.name: start + begin for info, begin, _ in entries},
        metadata,
    )


def _header_length(fd: int, size: int, path: Path) -> int:
    if size < LENGTH_BYTES:
        raise _damaged(path, f"it has {size} bytes, too few for a safetensors header")
    (length,) = struct.unpack("<Q", os.pread(fd, LENGTH_BYTES, 0))
    if length > size - LENGTH_BYTES:
        raise _damaged(
            path,
            f"the header claims {length} bytes, but only {size - LENGTH_BYTES} follow; it is "
            "truncated or not a safetensors file (a Git LFS pointer, perhaps)",
        )
    if length > MAX_HEADER_BYTES:
        most = f"at most {MAX_HEADER_BYTES} are allowed"
        raise _damaged(path, f"the header claims {length} bytes, {most}")
    return int(length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"the name {twice!r} occurs twice")
    return result


def _entry(
    name: str, entry: object, path: Path, known: dict[tuple[str | int, ...], TensorInfo]
) -> tuple[TensorInfo, int, int]:
    """Parse one tensor's header entry to (info, begin, end), relative to the start of the data.

    `known` has a checked tensor of each dtype and shape, because thousands of tensors share a few.
    """
    if not isinstance(entry, dict) or not entry.keys() >= _ENTRY:
        raise _damaged(
            path,
            f"tensor {name!r} has the header entry {str(entry)[:80]}, expected dtype, shape and "
            "data_offsets",
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {dtype!r}{did_you_mean(str(dtype), DTYPE_OF)}",
            hint=f"readable: {', '.join(DTYPE_OF)}; save the model in one of these",
        )
    if len(name) > MAX_NAME_LENGTH:
        long = f"a tensor's name has {len(name)} characters ({name[:40]!r}...)"
        raise _damaged(path, f"{long}, at most {MAX_NAME_LENGTH} are allowed")
    are_lists = type(shape) is list and type(offsets) is list and len(offsets) == 2
    # `type` because a bool is an int
    if not are_lists or {*map(type, shape), *map(type, offsets)} != _INT:
        raise _damaged(
            path,
            f"tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}, expected lists of "
            "non-negative integers, two of them for the offsets",
        )
    like = known.get((dtype, *shape))
    if like is None:
        like = known[dtype, *shape] = _first_of_kind(name, dtype, shape, path)
    begin, end = offsets
    if end - begin != like.nbytes:
        raise _damaged(
            path,
            f"tensor {name!r} of shape {shape} and dtype {dtype} needs {like.nbytes} bytes, but "
            f"its offsets {begin}:{end} hold {end - begin}",
        )
    return TensorInfo(name, like.dtype, like.shape, like.nbytes), begin, end


def _first_of_kind(name: str, dtype: str, shape: list[int], path: Path) -> TensorInfo:
    # torch counts the elements even if an axis of length zero hides them.
    if min(shape, default=0) < 0 or math.prod(axis or 1 for axis in shape) > MOST_ELEMENTS:
        raise _damaged(
            path,
            f"tensor {name!r} has shape {shape!r}, expected non-negative axes that multiply to at "
            f"most {MOST_ELEMENTS} elements",
        )
    kind = DTYPE_OF[dtype]
    return TensorInfo.of(name, kind, [*shape[:-1], shape[-1] // kind.pack] if shape else [])


def _check_coverage(
    entries: Sequence[tuple[TensorInfo, int, int]], data_bytes: int, path: Path
) -> None:
    """Refuse tensors that do not cover the data exactly, without gaps or overlaps."""
    expected = 0
    for info, begin, end in entries:
        if begin != expected:
            kind = "overlaps the one before" if begin < expected else "leaves a gap before it"
            where = f"it begins at byte {begin}, expected {expected}"
            raise _damaged(path, f"tensor {info.name!r} {kind}: {where}")
        if end > data_bytes:
            raise _damaged(
                path,
                f"tensor {info.name!r} ends at byte {end} of the data, but the file holds "
                f"{data_bytes}; it is truncated",
            )
        expected = end
    if expected != data_bytes:
        rest = data_bytes - expected
        raise _damaged(path, f"{rest} bytes after the last tensor belong to none")


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
