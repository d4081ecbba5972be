"""Keys and values of several texts of unlike length: a slot for each, filled from its beginning.

transformers' own caches write all rows of a batch at one position. Here every slot has a position
of its own, so that a finished text can give its slot to the next prompt while others go on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CacheLayerMixin


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, (slots, heads, columns, width) each."""

    is_sliding = False

    def __init__(self, owner: SlotCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.is_initialized = True
        self._owner = owner

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Made whole, so nothing is left to do."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token of every slot at its position; give back the window in use."""
        assert self.keys is not None
        assert self.values is not None
        owner = self._owner
        self.keys[owner.rows, :, owner.positions] = key_states[:, :, 0]
        self.values[owner.rows, :, owner.positions] = value_states[:, :, 0]
        return self.keys[:, :, : owner.window], self.values[:, :, : owner.window]

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._owner.window, 0

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self._owner.window

    def get_max_length(self) -> int:
        return self._owner.capacity

    def get_max_cache_shape(self) -> int:
        """What `get_max_length` was called before."""
        return self._owner.capacity


class SlotCache(Cache):
    """Slots for all layers, shaped like those of a first prefill."""

    def __init__(self, like: Cache, slots: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.window = capacity
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.rows = torch.arange(slots, device=device)
        layers = [self._empty(layer, slots) for layer in layers_of(like)]
        super().__init__(layers=layers)  # type: ignore[arg-type]

    def _empty(self, like: CacheLayerMixin, slots: int) -> SlotLayer:
        def room(tensor: Tensor | None) -> Tensor:
            assert tensor is not None
            _rows, heads, _columns, width = tensor.shape
            return tensor.new_zeros(slots, heads, self.capacity, width)

        return SlotLayer(self, room(like.keys), room(like.values))

    def adopt(self, prefill: Cache, rows: Tensor, slots: Tensor) -> None:
        """Take over what a prefill has cached: row `rows[i]` into slot `slots[i]`.

        What it holds of padding lies behind a text's end, where nobody looks before it is
        overwritten.
        """
        for mine, other in zip(layers_of(self), layers_of(prefill), strict=True):
            for name in ("keys", "values"):
                cached: Tensor = getattr(other, name)
                getattr(mine, name)[slots, :, : cached.shape[2]] = cached[rows]

    def keep(self, slots: Tensor) -> None:
        """Go on with these slots only."""
        self.positions = self.positions[slots]
        self.rows = torch.arange(len(slots), device=slots.device)
        for layer in layers_of(self):
            assert layer.keys is not None
            assert layer.values is not None
            layer.keys, layer.values = layer.keys[slots], layer.values[slots]


def layers_of(cache: Cache) -> list[CacheLayerMixin]:
    """A cache's layers, all of which must be plain ones of keys and values."""
    return [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]


def bytes_per_token(cache: Cache) -> int:
    """What one token of one text takes in all layers."""
    total = 0
    for layer in layers_of(cache):
        for tensor in (layer.keys, layer.values):
            assert tensor is not None
            total += tensor.shape[1] * tensor.shape[3] * tensor.element_size()
    return total
