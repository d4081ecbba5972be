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
from moemerge.text.batches import Batch

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


# --- router inputs as one block ------------------------------------------------------------------
#
# The kernels are fastest with few, long blocks. On a GPU, a domain's inputs are therefore copied
# into one block. A batch's own storage is emptied while it waits, and refilled from the block
# before it continues, so that hidden states are held once.

DomainSplit = tuple[str, bool]  # domain, holdout


class Gathered:
    """One block per domain, into which the batches' inputs are copied in order."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._tokens: dict[DomainSplit, int] = {}
        for batch in batches:
            key = (batch.domain, batch.holdout)
            self._tokens[key] = self._tokens.get(key, 0) + batch.tokens
        self._blocks: dict[DomainSplit, Tensor] = {}
        self._used: dict[DomainSplit, int] = {}

    def take(self, batch: Batch, tokens: Tensor, rows: Tensor | None) -> Tensor:
        """Copy the batch's real tokens into the block; return their part of it, (tokens, d)."""
        key = (batch.domain, batch.holdout)
        if key not in self._blocks:
            self._blocks[key] = tokens.new_empty(self._tokens[key], tokens.shape[1])
            self._used[key] = 0
        count = tokens.shape[0] if rows is None else rows.shape[0]
        place = self._blocks[key][self._used[key] : self._used[key] + count]
        self._used[key] += count
        if rows is None:
            return place.copy_(tokens)
        return torch.index_select(tokens, 0, rows, out=place)


class Emptied:
    """A waiting batch's tensor whose memory was released; `refill` restores its real tokens.

    Padding is lost: it becomes zero, and no real token reads it.
    """

    def __init__(self, tensor: Tensor, copy: Tensor, rows: Tensor | None) -> None:
        self._storage = tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._copy = copy
        self._rows = rows
        self._storage.resize_(0)

    @classmethod
    def of(cls, tensor: Tensor, copy: Tensor, rows: Tensor | None) -> Emptied | None:
        """Release a tensor's memory; `copy` holds its `rows` (None: all).

        Return None if the storage holds more than the tensor.
        """
        whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        resizable = tensor.untyped_storage().resizable()
        if not (whole and resizable and tensor.is_contiguous()):
            return None
        return cls(tensor, copy, rows)

    def refill(self) -> None:
        self._storage.resize_(self._nbytes)
        tokens = as_bytes(self._storage).view(self._copy.dtype).view(-1, self._copy.shape[1])
        if self._rows is None:
            tokens.copy_(self._copy)
        else:
            tokens.zero_().index_copy_(0, self._rows, self._copy)
