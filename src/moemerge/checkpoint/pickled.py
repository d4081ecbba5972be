"""One `pytorch_model.bin`, only ever through torch's restricted unpickler."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# A mapping counts every page it has touched as resident; it is dropped and made anew after this
# many bytes were read, so that memory stays bounded.
REMAP_BYTES: Final = 256 * 2**20
CONVERT: Final = (
    "convert the model to safetensors in a place you trust (load it, then save_pretrained)"
)


class PickledFile:
    """A pickled state dict, mapped. Reading is safe from any thread."""

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

    def read(
        self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """A fresh copy of a tensor or of a range of its leading-axis rows."""
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

    def prefetch(self, name: str, rows: tuple[int, int] | None = None) -> None:
        """The file is mapped: the system reads ahead by itself."""

    def sample(self, name: str, limit: int) -> bytes:
        """At most about `limit` bytes from the middle of a tensor."""
        with self._lock:
            state = self._state if self._state is not None else _load(self.path)
        flat = state[name].detach().reshape(-1)
        count = min(flat.numel(), max(1, limit // flat.dtype.itemsize))
        begin = (flat.numel() - count) // 2
        return bytes(flat[begin : begin + count].contiguous().view(torch.uint8).tolist())


def _load(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, or is no pickle of tensors at all; "
            "it is not opened, since unpickling may run any code",
            hint=CONVERT,
        ) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing", hint="fetch the missing file") from error
    except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read: {first_line}", hint=CONVERT) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, expected a dict of tensors", hint=CONVERT
        )
    for name, value in state.items():
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not dense or value.is_quantized:
            raise CheckpointError(
                f"{path}: {name!r} is a {type(value).__name__}, expected a plain dense tensor",
                hint=CONVERT,
            )
    return state
