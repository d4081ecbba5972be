"""Router inputs of a domain as one block on a GPU, and batches that wait without their own copy.

The kernels want few, long blocks. So the inputs are copied side by side, and the batch's own
storage is emptied while it waits and filled again from the block before it goes on (see `spill`
for why that is safe): hidden states are kept once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moemerge.features.spill import as_bytes
from moemerge.text.batches import Batch

Key = tuple[str, bool]  # domain, holdout


class Gathered:
    """Blocks that the batches' inputs are copied into, in the order of the batches."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._tokens: dict[Key, int] = {}
        for batch in batches:
            key = (batch.domain, batch.holdout)
            self._tokens[key] = self._tokens.get(key, 0) + batch.tokens
        self._blocks: dict[Key, Tensor] = {}
        self._used: dict[Key, int] = {}

    def take(self, batch: Batch, tokens: Tensor, rows: Tensor | None) -> Tensor:
        """A copy of the batch's real tokens, (tokens, d), beside those that came before."""
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
    """A waiting batch's tensor without its memory; `refill` brings its tokens back.

    What stood at padded places is lost: they get zeros, which no real token ever reads.
    """

    def __init__(self, tensor: Tensor, copy: Tensor, rows: Tensor | None) -> None:
        self._storage = tensor.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self._copy = copy
        self._rows = rows
        self._storage.resize_(0)

    @classmethod
    def of(cls, tensor: Tensor, copy: Tensor, rows: Tensor | None) -> Emptied | None:
        """`copy` holds the tensor's `rows` (None: all). None where its storage holds more."""
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
