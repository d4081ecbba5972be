"""A distillation that can be run: its steps, optimiser and memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from moemerge.config.repair_settings import DistillSettings
from moemerge.forward.settings import HEADROOM
from moemerge.forward.trainable import TrainedLayout
from moemerge.repairs.distilling.memory import TrainingSize
from moemerge.repairs.distilling.optimisers import OptimiserName
from moemerge.repairs.lockstep.job import RepairJob
from moemerge.repairs.lockstep.request import RepairRequest, request_key
from moemerge.runtime.devices import available_memory

LEAST_STEPS: Final = 100
EPOCHS: Final = 2
MOST_EPOCHS: Final = 16
# Learning rates at which the search begins.
FIRST_RATE: Final[Mapping[OptimiserName, float]] = {"adamw": 1e-4, "adafactor": 1e-3}
LORA_RATE: Final = 1e-3

DistillRequest = RepairRequest[DistillSettings]


@dataclass(frozen=True, kw_only=True)
class DistillJob(RepairJob[DistillSettings]):
    """A distillation that can be run."""

    layout: TrainedLayout
    vocabulary: int

    @cached_property
    def steps(self) -> int:
        settings = self.request.settings
        if settings.steps != "auto":
            return int(settings.steps)
        epoch = max(1.0, sum(len(d.rows) for d in self.text.domains) / settings.batch)
        return round(min(max(LEAST_STEPS, EPOCHS * epoch), max(1.0, MOST_EPOCHS * epoch)))

    def _size(self, *, recompute: bool) -> TrainingSize:
        return TrainingSize.of(
            self.merged,
            self.layout,
            self.stream.dtype,
            self.stream.device,
            vocabulary=self.vocabulary,
            recompute=recompute,
            lora=self.request.settings.lora,
            shards=self.ranks.count if self.ranks.can_shard(self.stream.device) else 1,
        )

    def _fits(self, nbytes: int) -> bool:
        """Return whether the device of rank 0 has this much memory."""
        fits = nbytes <= available_memory(self.stream.device) * HEADROOM
        return self.ranks.broadcast_object(fits)

    @cached_property
    def optimiser(self) -> OptimiserName:
        """Return the optimiser; `auto` takes AdamW if the device has the memory."""
        chosen = self.request.settings.optimiser
        if chosen != "auto":
            return chosen
        return (
            "adamw" if self._fits(self._size(recompute=True).needed_bytes("adamw")) else "adafactor"
        )

    @cached_property
    def size(self) -> TrainingSize:
        """Return what memory depends on. Adapters are for little memory, so they recompute."""
        chosen, kept = self.request.settings.recompute, self._size(recompute=False)
        if chosen is None:
            needed = kept.needed_bytes(self.optimiser) + kept.optimised_bytes(self.optimiser)
            chosen = kept.adapters is not None or not self._fits(needed)
        return self._size(recompute=chosen)

    @property
    def first_rate(self) -> float:
        """Return the learning rate at which the search begins."""
        return LORA_RATE if self.request.settings.lora is not None else FIRST_RATE[self.optimiser]

    @property
    def needed_bytes(self) -> int:
        """Return the estimated peak memory of the training on its device."""
        return self.size.needed_bytes(self.optimiser)

    @cached_property
    def snapshot_device(self) -> torch.device:
        """Return where the best weights so far are kept: on the device if it has the room."""
        needed = self.needed_bytes + self.size.optimised_bytes(self.optimiser)
        return self.stream.device if self._fits(needed) else torch.device("cpu")

    @property
    def key(self) -> dict[str, Any]:
        return {
            "merged": self.merged.checkpoint.fingerprint(),
            "sources": {
                name: hashlib.sha256(source.checkpoint.fingerprint().encode()).hexdigest()
                for name, source in self.sources.items()
            },
            "ranks": self.ranks.count,
            "steps": self.steps,
            "micro_tokens": self.size.micro_tokens,
            "optimiser": self.optimiser,
            **request_key(self.request, self.text.domains, self.stream.device, self.stream.dtype),
        }
