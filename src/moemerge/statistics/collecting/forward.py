"""The forward pass of a Fisher run, which stores every layer's input and call."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moemerge.checkpoint.output import temporary_folder, writing
from moemerge.checkpoint.tensors import as_bytes
from moemerge.errors import ArchitectureError
from moemerge.forward.input_hooks import UnitMap
from moemerge.forward.spill import Offload
from moemerge.forward.stops import Call, Rerun
from moemerge.forward.stream import ModelStream
from moemerge.runtime.devices import available_memory
from moemerge.runtime.progress import Progress
from moemerge.statistics.collecting.job import CollectingJob
from moemerge.text.batches import Batch

# Fraction of the free memory that stored hidden states may use.
SHARE = 0.3

StateKey = tuple[int, int]  # (layer, batch)


class StateStore:
    """Hidden states that the backward pass takes by key, each once."""

    def __init__(self, where: Offload, device: torch.device, folder: Path) -> None:
        self._where = where
        self._device = device
        self._kept: dict[StateKey, Tensor] = {}
        self._files: dict[StateKey, tuple[Path, torch.dtype, torch.Size]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if where == "disk":
            with writing(folder):
                self._folder = temporary_folder(".moemerge-states-", folder)

    def put(self, key: StateKey, value: Tensor) -> None:
        """Store a copy, unless it already stays on the device."""
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

    def take(self, key: StateKey) -> Tensor:
        """Remove a state and return it on the device."""
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


@contextlib.contextmanager
def run_forward(job: CollectingJob, progress: Progress) -> Iterator[Forward]:
    """Stream the model once; inside the context, all stored states exist."""
    # Offloaded states are stored for the backward pass anyway.
    settings = replace(job.stream, offload="device")
    with ModelStream(
        job.model.checkpoint,
        job.batches,
        settings,
        on_output=lambda batch, hidden: None,
        progress=progress,
    ) as stream:
        forward = Forward(job, stream)
        try:
            for _ in stream:
                pass
            forward.check()
            yield forward
        finally:
            forward.store.close()


class Forward:
    """Everything the backward pass needs: the input and the call of every layer."""

    def __init__(self, job: CollectingJob, stream: ModelStream) -> None:
        self.model: Any = stream.model
        self.anatomy = anatomy = stream.anatomy
        self.input_hooks = stream.input_hooks
        self.units = UnitMap(job.model.checkpoint, job.model.architecture, stream.names)
        self.units.require_experts(stream.input_hooks)
        self.tail = ""  # the norm after the last layer
        self.calls: dict[StateKey, Rerun] = {}
        # The inputs of the layers; beyond the last layer, that of the tail.
        place, folder = _place(job, stream), job.request.out.absolute().parent
        self.store = StateStore(place, job.stream.device, folder)
        self._label = job.model.label
        self._numbers = {id(batch): number for number, batch in enumerate(job.batches)}
        self._layers = {path: number for number, path in enumerate(anatomy.layers)}
        self._after: set[str] = set()
        tails = [
            f"{anatomy.owner}.{name}"
            for name, child in stream.model.get_submodule(anatomy.owner).named_children()
            if not any(path.startswith(f"{anatomy.owner}.{name}.") for path in anatomy.layers)
        ]
        stream.listen([*anatomy.layers, *tails], self._on_calls)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Return the names of the parameters of the norm and of later modules."""
        owner, tail = self.anatomy.owner + ".", self.tail + "."
        return tuple(
            name
            for name in self.model.state_dict()
            if name.startswith(tail) or not name.startswith(owner)
        )

    def _on_calls(self, batch: Batch, rows: Tensor | None, calls: list[Call]) -> None:
        number = self._numbers[id(batch)]
        for call in calls:
            layer = self._layers.get(call.path)
            if layer is None:
                # Modules outside the layers; those called after the last layer are the tail.
                if (len(self._layers) - 1, number) in self.calls:
                    self._after.add(call.path)
                    hidden = call.argument(0, "hidden_states", "x", "input")
                    self.tail = call.path
                    self.store.put((len(self._layers), number), hidden)
                continue
            rerun = call.rerun()
            if rerun is None:
                raise ArchitectureError(f"{call.path} is called without hidden states")
            hidden, self.calls[layer, number] = rerun
            self.store.put((layer, number), hidden)

    def check(self) -> None:
        if len(self._after) != 1:
            called = ", ".join(sorted(self._after)) or "nothing"
            raise ArchitectureError(
                f"{self._label}: expected one norm after the last layer, found {called}; "
                "gradients cannot be sent back through it",
                hint='gram statistics need the forward pass alone: `kind="gram"`',
            )


def _place(job: CollectingJob, stream: ModelStream) -> Offload:
    """Return where the states of all layers fit."""
    wanted = job.request.settings.offload
    if wanted != "auto":
        return wanted
    config: Any = stream.model.config.get_text_config()
    padded = sum(batch.input_ids.numel() for batch in job.batches)
    depth = len(stream.anatomy.layers) + 1
    nbytes = padded * int(config.hidden_size) * job.stream.dtype.itemsize * depth
    if nbytes <= SHARE * available_memory(job.stream.device):
        return "device"
    host = torch.device("cpu")
    if job.stream.device != host and nbytes <= SHARE * available_memory(host):
        return "cpu"
    return "disk"
