"""The memory that a distillation needs on its device, estimated from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from moemerge.families.describe import describe_architecture
from moemerge.families.opened import OpenModel
from moemerge.forward.trainable import TrainedLayout
from moemerge.repairs.adafactor import CHUNK, OptimiserName
from moemerge.repairs.distill_student import adapter_numel, needs_copies

# Padded tokens that run at once, and bytes that their logits may take with their gradient.
MICRO_TOKENS: Final = {"cpu": 4096, "cuda": 16384}
LOGITS_BYTES: Final = {"cpu": 2**30, "cuda": 2**33}
LOGITS_COPIES: Final = 5  # in float32: logits (twice in bfloat16), exponentials, gradients
# For the backward pass a layer stores about this many copies of its input, and for every width² of
# the parameters that a token uses, this many more. Gradients take half of it.
LAYER_COPIES: Final = 24
MATRIX_COPIES: Final = 3
GRADIENT_SHARE: Final = 0.5
ADAMW_BYTES: Final = 8  # per float32 value: two moments
CHUNK_COPIES: Final = 5  # in float32, of the weights that Adafactor updates at once


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """The numbers of parameters and tokens that decide how much memory a training takes."""

    dtype: torch.dtype
    total: int  # parameters of the model
    matrices: int  # parameters that are trained or adapted
    largest: int  # parameters of the largest such tensor
    adapters: int | None  # parameters of the adapters; None: the weights themselves are trained
    active: int  # parameters that a token uses
    layers: int
    width: int
    vocabulary: int
    recompute: bool
    micro_tokens: int
    shards: int = 1  # ranks that the model's weights are distributed over

    @classmethod
    def of(
        cls,
        opened: OpenModel,
        layout: TrainedLayout,
        dtype: torch.dtype,
        device: torch.device,
        *,
        vocabulary: int,
        recompute: bool,
        lora: int | None,
        shards: int,
    ) -> TrainingSize:
        architecture = opened.architecture
        described = describe_architecture(architecture, opened.checkpoint.tensors)
        logits = LOGITS_BYTES.get(device.type, LOGITS_BYTES["cuda"])
        fitting = logits // (LOGITS_COPIES * 4 * vocabulary)
        most = MICRO_TOKENS.get(device.type, MICRO_TOKENS["cuda"])
        return cls(
            dtype=dtype,
            total=described.parameters,
            matrices=layout.numel,
            largest=max(map(math.prod, layout.shapes.values())),
            adapters=None if lora is None else adapter_numel(layout.shapes, lora),
            active=described.active_parameters,
            layers=architecture.num_layers,
            width=architecture.hidden_size or 1,
            vocabulary=vocabulary,
            recompute=recompute,
            micro_tokens=max(1, min(most, fitting)),
            shards=shards,
        )

    @property
    def parameters(self) -> int:
        """Return the number of trained parameters."""
        return self.matrices if self.adapters is None else self.adapters

    def optimised_bytes(self, optimiser: OptimiserName) -> int:
        """Return the bytes of what the optimiser updates: weights, float32 copies or adapters."""
        wide = self.adapters is not None or needs_copies(optimiser, self.dtype)
        return self.parameters * (4 if wide else self.dtype.itemsize)

    def state_bytes(self, optimiser: OptimiserName) -> int:
        """Return the bytes of the optimiser's state, and of its temporary values."""
        if optimiser == "adamw":
            return self.parameters * ADAMW_BYTES
        return CHUNK_COPIES * 4 * min(CHUNK, self.largest)

    def needed_bytes(self, optimiser: OptimiserName) -> int:
        """Return the estimated peak memory of the training on its device."""
        size = self.dtype.itemsize
        optimised = self.optimised_bytes(optimiser)
        state = optimised + self.state_bytes(optimiser)  # with gradients
        weights = self.total * size
        if self.adapters is not None:
            # The factors, and the adapted matrices with their gradients: of one layer at a time, if
            # nothing is kept for the backward pass.
            at_once = self.matrices // self.layers if self.recompute else self.matrices
            state += optimised + 2 * at_once * size
        else:
            if needs_copies(optimiser, self.dtype):
                state += optimised + self.parameters * size  # copies; gradients before widening
            state //= self.shards
        if self.shards > 1:  # a layer is gathered while the next one is fetched
            weights = weights // self.shards + 2 * weights // self.layers
        return weights + state + self.micro_tokens * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Return the estimated bytes of one token's activations and logits."""
        used = self.active / self.layers
        layer = LAYER_COPIES * self.width + MATRIX_COPIES * used / self.width
        stored = self.layers * self.width + layer if self.recompute else self.layers * layer
        activations = self.dtype.itemsize * (stored + GRADIENT_SHARE * layer)
        return round(activations) + 4 * LOGITS_COPIES * self.vocabulary
