"""Hidden states that wait for the way back: on the device, in CPU memory, or on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moemerge.checkpoint.output import writing
from moemerge.checkpoint.tensors import as_bytes
from moemerge.features.spill import Offload

Key = tuple[int, int]  # (layer, batch)


class Store:
    """Keeps tensors under a key; each is taken once."""

    def __init__(self, where: Offload, device: torch.device, folder: Path) -> None:
        self._where = where
        self._device = device
        self._kept: dict[Key, Tensor] = {}
        self._files: dict[Key, tuple[Path, torch.dtype, torch.Size]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if where == "disk":
            with writing(folder):
                self._folder = tempfile.TemporaryDirectory(prefix=".moemerge-states-", dir=folder)

    def put(self, key: Key, value: Tensor) -> None:
        """Keep a copy, unless the device keeps it anyway."""
        value = value.detach()
        if self._folder is not None:
            file = Path(self._folder.name) / f"{key[0]}-{key[1]}.bin"
            with writing(file), file.open("wb") as stream:
                stream.write(as_bytes(value.cpu().contiguous()))
            self._files[key] = (file, value.dtype, value.shape)
        elif self._where == "cpu" and self._device.type != "cpu":
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._kept[key] = host.copy_(value, non_blocking=True)
        else:
            self._kept[key] = value

    def take(self, key: Key) -> Tensor:
        """On the device; forgotten here."""
        if key in self._files:
            file, dtype, shape = self._files.pop(key)
            flat = torch.from_numpy(np.fromfile(file, dtype=np.uint8))
            file.unlink()
            return flat.view(dtype).reshape(shape).to(self._device)
        return self._kept.pop(key).to(self._device, non_blocking=True)

    def close(self) -> None:
        self._kept.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
