"""Write statistics: tensors are appended as they are ready, and the header comes last.

Space for the header, large enough for every unit, is reserved at the front and padded with blanks.
The file is a hidden sibling until `commit` renames it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moemerge.checkpoint.output import writing
from moemerge.checkpoint.safetensors_file import HEADER_ALIGNMENT, LENGTH_BYTES, METADATA
from moemerge.checkpoint.tensors import as_bytes
from moemerge.config.documents import Provenance
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import CheckpointError
from moemerge.runtime.files import hidden_sibling, remove_stale, write_at
from moemerge.runtime.lazy import torch
from moemerge.runtime.outputs import FileKind, check_output_file
from moemerge.statistics.file import FORMAT_NUMBER, STATISTICS_FORMAT

if TYPE_CHECKING:
    from torch import Tensor


# Header bytes per unit: its key up to four times, and numbers.
_KEYS_PER_UNIT: Final = 4
_BYTES_PER_UNIT: Final = 320
_BYTES_OF_THE_REST: Final = 64 * 1024
_NOTICE_BYTES: Final = 16 * 1024


class StatisticsWriter:
    """Writes a file of statistics that appears complete or not at all. A context manager.

    `keys` are all units that may be added. The bytes depend only on the order of `add`.
    """

    def __init__(
        self,
        out: Path,
        *,
        kind: StatisticsKind,
        provenance: Provenance,
        keys: Collection[str],
        overwrite: bool = False,
    ) -> None:
        check_output_file(out, FileKind.STATISTICS, overwrite=overwrite)
        self.out = out
        self._overwrite = overwrite
        self._kind: StatisticsKind = kind
        self._provenance = provenance
        self._reserved = _reserved_bytes(keys)
        self._entries: dict[str, dict[str, Any]] = {}
        self._units: dict[str, tuple[str, list[int]]] = {}
        self._tokens: dict[str, int] = {}
        self._end = 0  # end of the data allocated so far
        self._target = out.absolute()  # a link is replaced: what it points to is not ours
        self._path = hidden_sibling(self._target, "partial")
        with writing(out):
            remove_stale(self._target)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd: int | None = os.open(self._path, flags, 0o666)

    def add(
        self,
        name: str,
        shape: Sequence[int],
        value: Tensor | None,
        *,
        units: Mapping[str, Sequence[int]],
        tokens: int,
    ) -> None:
        """Append a float32 tensor, on any device, for `units` (key -> shape). None means zeros."""
        if name in self._entries or any(key in self._units for key in units):
            raise CheckpointError(f"statistics of {name!r} come a second time for {self.out}")
        if value is not None and (value.dtype != torch.float32 or list(value.shape) != [*shape]):
            raise CheckpointError(
                f"statistics {name!r} were announced as {list(shape)} float32, "
                f"but {list(value.shape)} {value.dtype} came"
            )
        size = 4 * math.prod(map(int, shape))
        begin, self._end = self._end, self._end + size
        self._entries[name] = {
            "dtype": "F32",
            "shape": [int(length) for length in shape],
            "data_offsets": [begin, self._end],
        }
        self._tokens[name] = int(tokens)
        self._units.update({key: (name, [*map(int, shape)]) for key, shape in units.items()})
        if value is not None and size:
            assert self._fd is not None
            data = as_bytes(value.detach().cpu().contiguous())
            with writing(self.out):
                write_at(self._fd, data, LENGTH_BYTES + self._reserved + begin)

    def commit(self, *, sequences: int, notices: Sequence[str] = ()) -> None:
        """Write the header and rename into place."""
        header = self._header(sequences, notices)
        assert self._fd is not None
        with writing(self.out):
            os.ftruncate(self._fd, LENGTH_BYTES + self._reserved + self._end)
            write_at(self._fd, memoryview(struct.pack("<Q", self._reserved) + header), 0)
            check_output_file(self.out, FileKind.STATISTICS, overwrite=self._overwrite)
            os.rename(self._path, self._target)
        self._close()

    def _header(self, sequences: int, notices: Sequence[str]) -> bytes:
        content = {
            "kind": self._kind,
            "provenance": self._provenance.model_dump(),
            "sequences": sequences,
            "units": self._units,
            "tokens": self._tokens,
            "notices": _within(notices, _NOTICE_BYTES),
        }
        metadata = {
            "format": "pt",
            STATISTICS_FORMAT: FORMAT_NUMBER,
            "content": json.dumps(content, separators=(",", ":")),
        }
        text = json.dumps({METADATA: metadata, **self._entries}, separators=(",", ":")).encode()
        if len(text) > self._reserved:
            raise CheckpointError(
                f"the header of {self.out} takes {len(text)} bytes, {self._reserved} were reserved"
            )
        return text + b" " * (self._reserved - len(text))

    def abort(self) -> None:
        """Remove everything. Does nothing after a commit."""
        if self._fd is None:
            return
        self._close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> StatisticsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def _reserved_bytes(keys: Collection[str]) -> int:
    size = sum(_KEYS_PER_UNIT * len(key.encode()) + _BYTES_PER_UNIT for key in keys)
    size += _BYTES_OF_THE_REST
    return size + -(LENGTH_BYTES + size) % HEADER_ALIGNMENT


def _within(notices: Sequence[str], limit: int) -> list[str]:
    kept: list[str] = []
    for notice in notices:
        limit -= 2 * len(notice.encode()) + 8
        if limit < 0:
            break
        kept.append(notice)
    return kept
