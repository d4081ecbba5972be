"""Which rows of a module's input are real tokens, of which sequence, and sent to which expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moemerge.text.batches import Batch


def _tokens_first(x: Tensor, batch: Batch) -> Tensor:
    """(rows, heads, length, width), as attention has it, with the tokens before the heads."""
    count, length = batch.mask.shape
    if x.dim() == 4 and x.shape[0] == count and x.shape[1] != length and x.shape[2] == length:
        return x.transpose(1, 2)
    return x


def real_tokens(x: Tensor, batch: Batch, rows: Tensor | None) -> Tensor | None:
    """The rows of x that belong to real tokens, (n, width); None where that cannot be told.

    `rows` are the places of real tokens in the flattened batch, None where nothing is padded.
    """
    width = x.shape[-1]
    x = _tokens_first(x, batch)
    if tuple(x.shape[:2]) == tuple(batch.mask.shape):
        x = x.flatten(0, 1)
    elif x.shape[0] != batch.mask.numel():
        return x.reshape(-1, width) if rows is None else None
    return (x if rows is None else x.index_select(0, rows)).reshape(-1, width)


def as_sequences(x: Tensor, batch: Batch) -> Tensor | None:
    """x as (sequences, tokens, width); None where it does not lie by sequence."""
    count, length = batch.mask.shape
    width = x.shape[-1]
    if x.dim() > 2 and x.shape[0] == count:
        return x.reshape(count, -1, width)
    if x.shape[0] == count * length:
        return x.reshape(count, -1, width)
    return None


def sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Places in the flattened choices (tokens, k), sorted by expert, and each expert's bounds.

    Numbers beyond the experts (tokens sent nowhere) come after the last bound.
    """
    flat = chosen.reshape(-1).to(torch.int64)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat.clamp(max=experts), minlength=experts + 1)[:experts]
    return order, [0, *counts.cumsum(0).tolist()]
