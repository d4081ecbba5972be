"""The estimate follows from shapes, and decides where parked batches go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from features import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.errors import ResourceError
from moemerge.features.memory import PARKED_COPIES, MemoryEstimate, choose_offload
from moemerge.features.stream import RouterStream
from moemerge.runtime.devices import available_memory

CPU = torch.device("cpu")
SMALL = MemoryEstimate(CPU, "device", 1, 2, 4, 8, 16, 32)


def test_sizes_by_hand(zoo_folder: Callable[..., Path]) -> None:
    batches = reference.batches()
    with RouterStream(Checkpoint.open(zoo_folder("olmoe")), batches, prefetch=True) as stream:
        memory = stream.memory
        layer = stream.model.get_submodule("model.layers.0")
        assert memory.layer == memory.ahead == sum(4 * p.numel() for p in layer.parameters())
        assert memory.root == 4 * (128 * 32 + 32)  # embeddings and norm, no head
    padded = sum(batch.input_ids.numel() for batch in batches)
    assert memory.parked == PARKED_COPIES * padded * 32 * 4
    assert memory.features == sum(batch.tokens for batch in batches) * 32 * 4
    assert memory.offload == "device"
    assert "parked activations" in memory.describe()


def test_what_is_where() -> None:
    assert SMALL.on_device == SMALL.on_host == 63
    disk = replace(SMALL, offload="disk")
    assert (disk.on_device, disk.on_disk) == (55, 8)
    gpu = replace(SMALL, device=torch.device("cuda"))
    assert (gpu.on_device, gpu.on_host) == (59, 4)
    spilled = replace(gpu, offload="cpu")
    assert (spilled.on_device, spilled.on_host) == (51, 12)


def test_the_nearest_place_with_room() -> None:
    free = available_memory(CPU)
    assert choose_offload(SMALL).offload == "device"
    assert choose_offload(replace(SMALL, parked=2 * free)).offload == "disk"
    with pytest.raises(ResourceError, match=r"largest layer .* usable on cpu[^$]*--max-tokens"):
        choose_offload(replace(SMALL, layer=2 * free))
