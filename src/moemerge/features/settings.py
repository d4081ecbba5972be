"""How a model is streamed: where, in which dtype, in how long batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from moemerge.architectures.opened import OpenModel
from moemerge.checkpoint import Checkpoint, main_dtype
from moemerge.features.loading import holds_scores
from moemerge.features.spill import SMALLEST, Offload
from moemerge.runtime.devices import gpu_memory
from moemerge.runtime.dtypes import parse_dtype
from moemerge.text.batches import DEFAULT_BATCH_TOKENS, gpu_batch_tokens

CPU = torch.device("cpu")
# A CPU gains nothing from long batches, and their temporaries are the largest thing it holds.
CPU_BATCH_TOKENS = 2048
# Config keys of attention that picks its keys by an indexer.
INDEXERS = ("index_topk", "indexer_budget")


@dataclass(frozen=True)
class StreamSettings:
    """Where a model is streamed and in which dtype. `None` means: on accelerators."""

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    offload: Offload | Literal["auto"] = "auto"  # where activations of waiting batches lie
    # Reads the next layer while one computes. On a CPU that takes memory and the very cores that
    # compute.
    prefetch: bool | None = None
    gather: bool | None = None  # hands out a domain's inputs side by side in memory
    spill_folder: Path | None = None
    spill_smallest: int = SMALLEST  # bytes of a storage that is worth parking elsewhere

    @property
    def prefetches(self) -> bool:
        return self.device.type != "cpu" if self.prefetch is None else self.prefetch

    @property
    def gathers(self) -> bool:
        return self.device.type != "cpu" if self.gather is None else self.gather


def forward_dtype(name: str, model: OpenModel) -> torch.dtype:
    """`auto` is the dtype of most of the checkpoint's bytes: what the model runs in elsewhere."""
    return stored_dtype(model.checkpoint) if name == "auto" else parse_dtype(name).torch


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most of a checkpoint's bytes."""
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
    # Scores of all pairs of tokens would be by far the largest part of a long batch.
    return min(tokens, DEFAULT_BATCH_TOKENS) if holds_scores(model.checkpoint) else tokens
