"""Settings of a stream: device, dtype, batch length, offloading; and its memory estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from moemerge.checkpoint import Checkpoint, format_size, main_dtype
from moemerge.errors import ArchitectureError, MoeMergeError, ResourceError
from moemerge.families.opened import OpenModel
from moemerge.forward.compat import attention_implementation
from moemerge.forward.loading import holds_scores
from moemerge.forward.routers import Anatomy
from moemerge.forward.spill import SMALLEST, Offload
from moemerge.forward.weights import PINNED_BYTES, Weights
from moemerge.runtime.devices import available_memory, gpu_memory, is_out_of_memory
from moemerge.runtime.dtypes import parse_dtype
from moemerge.text.batches import DEFAULT_BATCH_TOKENS, Batch, gpu_batch_tokens

CPU = torch.device("cpu")
LOGITS_BYTES = 2**31  # of one batch
# Long batches are no faster on a CPU, where their temporaries take the most memory.
CPU_BATCH_TOKENS = 2048
# Config keys of attention with an indexer that selects keys.
INDEXERS = ("index_topk", "indexer_budget")


@dataclass(frozen=True)
class StreamSettings:
    """Device, dtype and memory use of a stream. `None` means: only on accelerators."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    offload: Offload | Literal["auto"] = "auto"  # where activations of waiting batches are held
    # Read the next layer while one computes. On a CPU this takes memory, and cores from the
    # computation.
    prefetch: bool | None = None
    # Hold experts in their stored dtype on a CPU; every batch converts them again.
    narrow_experts: bool = False
    spill_folder: Path | None = None
    spill_smallest: int = SMALLEST  # bytes of a storage that is worth offloading

    @property
    def prefetches(self) -> bool:
        return self.device.type != "cpu" if self.prefetch is None else self.prefetch


def forward_dtype(name: str, model: OpenModel, device: torch.device) -> torch.dtype:
    """Return the dtype; `auto` is that of most of the checkpoint's bytes, on a CPU float32.

    Most CPUs have no bfloat16 products: without them, torch multiplies matrices up to 400 times
    slower than in float32.
    """
    if name != "auto":
        return parse_dtype(name).torch
    stored = stored_dtype(model.checkpoint)
    return torch.float32 if device.type == "cpu" and stored.itemsize < 4 else stored


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of most of a checkpoint's bytes."""
    return main_dtype(checkpoint.tensors.values()).torch


def batch_tokens(model: OpenModel, device: torch.device) -> int:
    """Padded tokens of a batch; 1 makes a batch of every row.

    Fixed by the device (a GPU by its size) and the model: batches decide the last bits of the
    result.
    Attention that picks its keys by an indexer counts padding among them in transformers, so rows
    that are padded would have other hidden states than alone.
    """
    if any(key in model.architecture.text_config for key in INDEXERS):
        return 1
    if device.type == "cpu":
        return CPU_BATCH_TOKENS
    width = model.architecture.hidden_size
    if width is None:
        return DEFAULT_BATCH_TOKENS
    tokens = gpu_batch_tokens(width, gpu_memory(device))
    # Attention scores of all pairs of tokens would take most of a long batch's memory.
    return min(tokens, DEFAULT_BATCH_TOKENS) if holds_scores(model.checkpoint) else tokens


def vocabulary_size(model: OpenModel) -> int:
    """Return the rows of the output head, from headers."""
    names = model.architecture.embedding_names()
    name = names.head or names.input
    return model.checkpoint.tensors[name].rows if name else 1


def logit_batch_tokens(model: OpenModel, device: torch.device, dtype: torch.dtype) -> int:
    """Return the padded tokens of a batch whose logits are computed, the largest tensor by far."""
    fitting = LOGITS_BYTES // (vocabulary_size(model) * dtype.itemsize)
    return max(1, min(batch_tokens(model, device), DEFAULT_BATCH_TOKENS, fitting))


# A batch that waits at a router holds the embeddings and the layer's input (in the model's frame),
# the residual and the router's input.
PARKED_COPIES = 4
# A running batch holds these, the attention's projections and one temporary of each.
RUNNING_COPIES = 10
HEADROOM = 0.9  # share of the free memory; allocators round up
NEAREST_FIRST: tuple[Offload, ...] = ("device", "cpu", "disk")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose."""

    device: torch.device
    offload: Offload
    root: int  # embeddings, norms, head: resident
    layer: int  # the largest layer
    ahead: int  # the prefetched layer
    parked: int  # activations of all waiting batches
    running: int  # temporaries of the running batch
    features: int  # router inputs at a stop

    @property
    def on_device(self) -> int:
        total = self.root + self.layer + self.ahead + self.running + self.features
        if self._spills:
            return total
        return total + self.parked

    @property
    def on_host(self) -> int:
        if self.device.type == "cpu":
            return self.on_device
        return PINNED_BYTES + (self.parked if self.offload == "cpu" else 0)

    @property
    def on_disk(self) -> int:
        return self.parked if self.offload == "disk" else 0

    @property
    def _spills(self) -> bool:
        return self.offload == "disk" or (self.offload == "cpu" and self.device.type != "cpu")

    def describe(self) -> str:
        parts = {
            "resident": self.root,
            "largest layer": self.layer,
            "next layer": self.ahead,
            "parked activations": self.parked,
            "running batch": self.running,
            "router inputs": self.features,
        }
        listed = ", ".join(
            f"{name} {format_size(nbytes)}" for name, nbytes in parts.items() if nbytes
        )
        return (
            f"streaming needs about {format_size(self.on_device)} on {self.device} ({listed}; "
            f"offload {self.offload})"
        )


def estimate_memory(
    weights: Weights,
    anatomy: Anatomy,
    batches: Sequence[Batch],
    root_names: Sequence[str],
    settings: StreamSettings,
) -> MemoryEstimate:
    """Estimate memory from shapes alone, without reading a tensor, and choose an `auto` offload."""
    text: Any = weights.model.config.get_text_config()
    width = _number(text, "hidden_size", "d_model")
    streams = max(1, _number(text, "hc_mult", "hc_count"))  # hyper-connections widen the residual
    itemsize = weights.model.dtype.itemsize
    padded = [batch.input_ids.numel() for batch in batches]
    token = width * itemsize
    largest = max(padded, default=0)
    chosen = _number(text, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
    inner = _number(text, "moe_intermediate_size", "intermediate_size")
    layer = max((weights.nbytes(path) for path in anatomy.layers), default=0)
    estimate = MemoryEstimate(
        device=weights.device,
        offload="device" if settings.offload == "auto" else settings.offload,
        root=weights.nbytes_of(root_names),
        layer=layer,
        ahead=layer if settings.prefetches else 0,
        parked=sum(
            # A padded batch has its own mask.
            PARKED_COPIES * streams * token * size + batch.padded * size * batch.input_ids.shape[1]
            for batch, size in zip(batches, padded, strict=True)
        ),
        running=_scores(text, batches, itemsize)
        + largest * (RUNNING_COPIES * streams * token + chosen * (3 * inner * itemsize + token)),
        features=token * sum(batch.tokens for batch in batches),
    )
    return choose_offload(estimate) if settings.offload == "auto" else estimate


def _scores(text: Any, batches: Sequence[Batch], itemsize: int) -> int:
    """Return the bytes of eager attention for all pairs of tokens.

    These are the scores, the masked scores, and their softmax in float32.
    """
    if attention_implementation(text) != "eager":
        return 0
    pairs = max((b.input_ids.numel() * b.input_ids.shape[1] for b in batches), default=0)
    return pairs * _number(text, "num_attention_heads") * (2 * itemsize + 4)


def needed(
    estimates: Sequence[MemoryEstimate], extra: int = 0, on_host: int = 0
) -> tuple[int, int]:
    """Return the bytes on the device and on the host for several models at once.

    `extra` is the job's own memory on the device, `on_host` that on the host of a GPU.
    """
    device = sum(estimate.on_device for estimate in estimates) + extra
    host = sum(estimate.on_host for estimate in estimates) + on_host
    return device, device if estimates[0].device.type == "cpu" else host


def fits(estimates: Sequence[MemoryEstimate], extra: int = 0, on_host: int = 0) -> bool:
    device, host = needed(estimates, extra, on_host)
    return (
        device <= available_memory(estimates[0].device) * HEADROOM
        and host <= available_memory(CPU) * HEADROOM
    )


def choose_offload(estimate: MemoryEstimate) -> MemoryEstimate:
    """Choose the fastest offload of a single model that fits; raise ResourceError if none does."""
    kinds = [kind for kind in NEAREST_FIRST if kind != "cpu" or estimate.device.type != "cpu"]
    for kind in kinds:
        estimate = replace(estimate, offload=kind)
        if fits([estimate]):
            return estimate
    usable = int(available_memory(estimate.device) * HEADROOM)
    raise ResourceError(
        f"{estimate.describe()}, but {format_size(usable)} are usable on {estimate.device}",
        hint="lower `max_tokens` or `max_length`, use smaller batches, or a larger machine",
    )


def _number(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = max(value)
        if isinstance(value, int) and value:
            return value
    return 0


def raise_forward_error(error: BaseException, where: str, memory: MemoryEstimate) -> NoReturn:
    """Convert an error of a model's forward pass to ours; ours and interrupts are re-raised."""
    if isinstance(error, MoeMergeError) or not isinstance(error, Exception):
        raise error
    if is_out_of_memory(error):
        raise ResourceError(
            f"{where}: out of memory on {memory.device} ({memory.describe()})",
            hint='use `offload="disk"`, lower `max_tokens` or `max_length`, or run fewer processes '
            "on this device",
        ) from error
    raise ArchitectureError(
        f"{where}: the model's forward failed: {type(error).__name__}: {error}"
    ) from error
