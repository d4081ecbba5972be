"""Whether several streamed models fit side by side, and where their activations may lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from moemerge.features.memory import HEADROOM, MemoryEstimate
from moemerge.features.spill import Offload
from moemerge.runtime.devices import available_memory

HOST = torch.device("cpu")
NEAREST_FIRST: tuple[Offload, ...] = ("device", "cpu", "disk")


def needed(memories: Sequence[MemoryEstimate], offload: Offload, extra: int) -> tuple[int, int]:
    """Bytes on the device and on the host; `extra` is what is done with the features."""
    placed = [replace(memory, offload=offload) for memory in memories]
    device = sum(memory.on_device for memory in placed) + extra
    host = sum(memory.on_host for memory in placed)
    return device, device if memories[0].device.type == "cpu" else host


def fits(memories: Sequence[MemoryEstimate], offload: Offload, extra: int) -> bool:
    device, host = needed(memories, offload, extra)
    return (
        device <= available_memory(memories[0].device) * HEADROOM
        and host <= available_memory(HOST) * HEADROOM
    )


def choose_offload(memories: Sequence[MemoryEstimate], extra: int) -> Offload:
    """The nearest place with room for parked activations; the farthest where nothing fits."""
    for kind in NEAREST_FIRST:
        if kind == "cpu" and memories[0].device.type == "cpu":
            continue
        if fits(memories, kind, extra):
            return kind
    return "disk"
