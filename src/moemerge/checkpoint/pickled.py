"""Read a `pytorch_model.bin`, always with torch's restricted unpickler."""

from __future__ import annotations

import os
import pickle
import struct
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moemerge.checkpoint.tensors import RowRange, TensorInfo
from moemerge.errors import CheckpointError, library_errors
from moemerge.runtime.files import open_plain
from moemerge.runtime.lazy import torch
from moemerge.runtime.torch_compat import record_offset

if TYPE_CHECKING:
    from torch import Tensor

# Every page read from a memory map counts as resident. The map is recreated after this many bytes,
# so that memory stays bounded.
REMAP_BYTES: Final = 256 * 2**20
CONVERT: Final = (
    "convert the model to safetensors in a place you trust (load it, then save_pretrained)"
)


class PickledFile:
    """A memory-mapped pickled state dict. Reading is thread-safe."""

    metadata: Mapping[str, str] = {}  # its format has none

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._state: dict[str, Tensor] | None = _load(path)
        self._touched = 0
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo.of(name, tensor.dtype, tensor.shape)
            for name, tensor in self._state.items()
        }

    def close(self) -> None:
        with self._lock:
            self._state = None

    def read(self, name: str, rows: RowRange | None = None, out: Tensor | None = None) -> Tensor:
        """Return a copy of a tensor or of a range of its leading-axis rows."""
        shape = self.tensors[name].block_shape(rows)
        with self._lock:
            if self._state is None or self._touched > REMAP_BYTES:
                self._state = None
                self._state = _load(self.path)
                self._touched = 0
            view = self._state[name]
            self._touched += view[rows[0] : rows[1]].nbytes if rows else view.nbytes
        if rows is not None:
            view = view[rows[0] : rows[1]]
        if out is None:
            out = torch.empty(shape, dtype=view.dtype)
        return out.copy_(view)

    def prefetch(self, name: str, rows: RowRange | None = None) -> None:
        """Do nothing: the system reads ahead in a memory map."""

    def sample(self, name: str, limit: int) -> bytes:
        """Return at most about `limit` bytes from the middle of a tensor."""
        with self._lock:
            state = self._state if self._state is not None else _load(self.path)
        flat = state[name].detach().reshape(-1)
        count = min(flat.numel(), max(1, limit // flat.dtype.itemsize))
        begin = (flat.numel() - count) // 2
        return bytes(flat[begin : begin + count].contiguous().view(torch.uint8).tolist())


def _load(path: Path) -> dict[str, Tensor]:
    with library_errors(CheckpointError, f"{path} cannot be read", hint=CONVERT):
        try:
            os.close(open_plain(path))
            _check_storages(path, torch.load(path, map_location="meta", weights_only=True))
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds more than tensors, or is not a pickle of tensors at all; "
                "it is not opened, since unpickling may run any code",
                hint=CONVERT,
            ) from error
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing", hint="fetch the missing file") from error
    assert isinstance(state, dict)  # checked by _check_storages
    return state


def _check_storages(path: Path, state: object) -> None:
    """Refuse anything but a dict of plain tensors whose bytes are all in the file.

    A memory map would replace missing bytes by those of the next tensor.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, expected a dict of tensors", hint=CONVERT
        )
    sizes = _record_sizes(path)
    for name, value in state.items():
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not isinstance(name, str) or not dense or value.is_quantized:
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__}, expected a plain dense tensor",
                hint=CONVERT,
            )
        storage = value.untyped_storage()
        held = sizes.get(record_offset(storage), 0)
        if held != storage.nbytes():
            raise CheckpointError(
                f"{path}: {name!r} needs {storage.nbytes()} bytes, but the file holds {held} of it",
                hint="the file is damaged or was not fully downloaded; fetch it again",
            )


def _record_sizes(path: Path) -> dict[int, int]:
    """Return the size of each record of the zip file, by the offset of its data."""
    sizes = {}
    with zipfile.ZipFile(path) as records, path.open("rb") as file:
        for record in records.infolist():
            file.seek(record.header_offset)
            # The data follow the name and the extra field of the local header.
            name_length, extra_length = struct.unpack("<26xHH", file.read(30))
            begin = record.header_offset + 30 + name_length + extra_length
            sizes[begin] = record.file_size if record.compress_type == zipfile.ZIP_STORED else 0
    return sizes
