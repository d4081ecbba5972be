"""What the experts of one layer read: tokens, and where each was sent."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moemerge.features.tokens import sort_by_expert


class Routed:
    """Inputs and choices of all batches, handed out expert by expert."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._inputs: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def add(self, x: Tensor, chosen: Tensor) -> None:
        """x (tokens, d) and its experts (tokens, k), kept as they are."""
        self._inputs.append(x.detach())
        self._chosen.append(chosen.detach())

    def by_expert(self) -> Iterator[tuple[int, Tensor]]:
        """Each expert with the tokens that were routed to it, (n, d), in the text's order."""
        inputs = torch.cat(self._inputs)
        self._inputs.clear()
        chosen = torch.cat(self._chosen)  # (tokens, k)
        order, bounds = sort_by_expert(chosen, self._experts)
        for expert in range(self._experts):
            places = order[bounds[expert] : bounds[expert + 1]]
            yield expert, inputs.index_select(0, places // chosen.shape[1])


class RoutedGradients:
    """Inputs, choices, routing weights and gradients of all batches, handed out by expert."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._lengths: list[int] = []  # real tokens of each sequence

    def add(
        self, x: Tensor, chosen: Tensor, weights: Tensor, gradient: Tensor, *, lengths: list[int]
    ) -> None:
        """x and d loss / d output (tokens, d); choices and their weights (tokens, k)."""
        self._parts.append((x, chosen, weights.detach(), gradient))
        self._lengths += lengths

    def by_expert(self) -> Iterator[tuple[int, Tensor, Tensor, list[int]]]:
        """Each expert: its inputs (n, d), gradients of its own output (n, d), both sequence by
        sequence, and how many tokens of each sequence it got."""
        x, chosen, weights, gradient = (
            torch.cat(values) for values in zip(*self._parts, strict=True)
        )
        self._parts.clear()
        order, bounds = sort_by_expert(chosen, self._experts)
        device = x.device
        lengths = torch.tensor(self._lengths, device=device)
        sequence = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        scale = weights.reshape(-1)
        width = chosen.shape[1]
        # All counts at once: the device is waited for once a layer.
        slots = chosen.reshape(-1).to(torch.int64).clamp(max=self._experts)
        pairs = slots * len(lengths) + sequence.repeat_interleave(width)
        counts = torch.bincount(pairs, minlength=(self._experts + 1) * len(lengths))
        table = counts.reshape(self._experts + 1, -1).tolist()
        for expert in range(self._experts):
            places = order[bounds[expert] : bounds[expert + 1]]
            tokens = places // width
            own = gradient.index_select(0, tokens) * scale.index_select(0, places)[:, None]
            yield expert, x.index_select(0, tokens), own, table[expert]
