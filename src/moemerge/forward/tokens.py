"""Tokens of a batch: vocabulary check, padding, sequences, order by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moemerge.errors import ArchitectureError, DataError
from moemerge.text.batches import Batch


def check_tokens(model: PreTrainedModel, batches: Sequence[Batch], label: str) -> None:
    """Refuse token ids outside the vocabulary, for which a GPU raises an obscure error."""
    if not batches:
        raise DataError("no batch of calibration text given")
    embedding: Any = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    largest = max(int(batch.input_ids.max()) for batch in batches)
    if rows is not None and largest >= rows:
        raise DataError(
            f"the text holds token {largest}, but {label} knows {rows} tokens",
            hint="text must be tokenized with the model's own tokenizer",
        )


def real_rows(batch: Batch, device: torch.device) -> Tensor | None:
    """Return the positions of real tokens in the flattened batch; None without padding."""
    if not batch.padded:
        return None
    return batch.mask.reshape(-1).nonzero().squeeze(1).to(device)


def flat_tokens(x: Tensor, batch: Batch) -> Tensor | None:
    """Return x as (rows * length, width) with padding; None if its rows are not tokens."""
    if x.dim() == 0 or x.shape[-1] == 0:
        return None
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.shape[0] == batch.mask.numel() else None


def real_tokens(x: Tensor, batch: Batch, rows: Tensor | None) -> Tensor | None:
    """Return the rows of x that belong to real tokens, (n, width); None if that is unknown.

    `rows` are the positions of real tokens in the flattened batch, None without padding.
    """
    width = x.shape[-1]
    count, length = batch.mask.shape
    # Attention has (rows, heads, length, width): move tokens before heads.
    if x.dim() == 4 and x.shape[0] == count and x.shape[1] != length and x.shape[2] == length:
        x = x.transpose(1, 2)
    if x.shape[:2] == batch.mask.shape:
        x = x.flatten(0, 1)
    elif x.shape[0] != batch.mask.numel():
        return x.reshape(-1, width) if rows is None else None
    return (x if rows is None else x.index_select(0, rows)).reshape(-1, width)


def finite(value: Tensor, batch: Batch, rows: Tensor | None) -> Tensor:
    """Return a flag on the device, without synchronising: whether all real tokens are finite.

    True if real tokens cannot be distinguished from padding, which may hold anything.
    """
    tokens = real_tokens(value, batch, rows) if value.is_floating_point() else None
    if tokens is None or tokens.numel() == 0:
        return torch.tensor(True, device=value.device)
    low, high = torch.aminmax(tokens.detach())
    return torch.isfinite(low) & torch.isfinite(high)


def as_sequences(x: Tensor, batch: Batch) -> Tensor | None:
    """Return x as (sequences, tokens, width); None if its rows are not grouped by sequence."""
    count, length = batch.mask.shape
    width = x.shape[-1]
    grouped = x.shape[0] == count * length or (x.dim() > 2 and x.shape[0] == count)
    return x.reshape(count, -1, width) if grouped else None


def routing_of(path: str, given: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments of a module with experts, in this order.

    They are its input (tokens, d), the chosen experts and their routing weights (tokens, k).
    """
    if len(given) < 3:
        raise ArchitectureError(f"{path} does not receive the routing of its tokens")
    x, chosen, weights = given[:3]
    return (x, weights, chosen) if chosen.is_floating_point() else (x, chosen, weights)


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Return positions in the flattened choices (tokens, k) sorted by expert, and the bounds.

    Indices beyond the experts, of tokens without an expert, come after the last bound.
    """
    flat = chosen.reshape(-1).to(torch.int64)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat.clamp(max=experts), minlength=experts + 1)[:experts]
    return order, [0, *counts.cumsum(0).tolist()]
