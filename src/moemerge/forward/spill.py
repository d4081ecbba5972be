"""Offload the activations of waiting batches: empty their storages in place, and refill them.

A batch that waits inside the model's forward keeps tensors alive in its stack frames (the layer's
input in the caller, the residual, masks), and no other code can drop those references. Emptying
the storage frees the memory all the same. Refilling it before the batch continues makes every
reference valid with the same bytes, so the computation does not change.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moemerge.checkpoint.output import temporary_folder, writing

Offload = Literal["device", "cpu", "disk"]
SMALLEST = 64 * 1024  # bytes; smaller storages are not worth a transfer


class Tracker(TorchFunctionMode):
    """Tracks the tensors made inside the mode, in one thread, that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[Tensor]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, Tensor):
                self._made.append(weakref.ref(value))
        return made

    def alive(self) -> list[Tensor]:
        live = [(ref, tensor) for ref in self._made if (tensor := ref()) is not None]
        self._made = [ref for ref, _ in live]
        return [tensor for _, tensor in live]


class Spill:
    """Offloads one batch's activations and restores them."""

    def __init__(self, where: Offload, device: torch.device, folder: Path | None) -> None:
        self._disk = where == "disk"
        self._device = device
        self._folder = folder
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | Path]] = []

    def out(self, tensors: Iterable[Tensor], keep: set[int], smallest: int) -> None:
        """Empty the storages of `tensors`, except those whose address is in `keep`."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            if nbytes <= smallest or storage.data_ptr() in keep or not storage.resizable():
                continue
            if storage.device.type != self._device.type:
                continue
            self._away.append((storage, nbytes, self._save(storage, nbytes)))
            storage.resize_(0)  # so a second tensor of this storage is skipped

    def back(self) -> None:
        """Fill every emptied storage again."""
        away, self._away = self._away, []
        for storage, nbytes, saved in away:
            storage.resize_(nbytes)
            self._load(as_bytes(storage), saved)

    def _save(self, storage: torch.UntypedStorage, nbytes: int) -> Tensor | Path:
        source = as_bytes(storage)
        if not self._disk:
            pinned = self._device.type == "cuda"
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            return host.copy_(source, non_blocking=True)
        assert self._folder is not None
        file = self._folder / f"{len(self._away)}.bin"
        # A copy, because a storage that numpy has seen can never be resized again.
        copy = torch.empty(nbytes, dtype=torch.uint8).copy_(source).numpy()
        with writing(file), file.open("wb") as stream:
            stream.write(copy.data)
        return file

    def _load(self, target: Tensor, saved: Tensor | Path) -> None:
        if isinstance(saved, Path):
            saved = torch.from_numpy(np.fromfile(saved, dtype=np.uint8))
        target.copy_(saved, non_blocking=True)


class SpillFactory:
    """Makes one `Spill` per batch, and owns the folder that they write to."""

    def __init__(self, where: Offload, device: torch.device, folder: Path | None = None) -> None:
        self._where = where
        self._device = device
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if where == "disk":
            self._folder = temporary_folder("moemerge-spill-", folder)

    @property
    def active(self) -> bool:
        # On a CPU, activations are in host memory already: only offloading to disk helps.
        return self._where == "disk" or (self._where == "cpu" and self._device.type != "cpu")

    def spill(self, number: int) -> Spill | None:
        if not self.active:
            return None
        place = None
        if self._folder is not None:
            place = Path(self._folder.name) / str(number)
            place.mkdir()
        return Spill(self._where, self._device, place)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def held_by(modules: Iterable[nn.Module]) -> set[int]:
    """Return the addresses of all storages that modules own and batches share."""
    held: set[int] = set()
    for module in modules:
        owned = (
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
            *vars(module).values(),
        )
        for value in owned:
            if isinstance(value, Tensor) and value.device.type != "meta":
                held.add(value.untyped_storage().data_ptr())
    return held


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
