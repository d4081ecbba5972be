"""Second moments of inputs: the mathematics of a Gram, also of each expert's own tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moemerge.features.tokens import sort_by_expert

# Tokens whose products are summed by the matrix unit in float32; beyond it float64 goes on. A GPU's
# unit cuts bits off at every step: 25 000 tokens at once are wrong by 5e-5, 1024 by 3e-6.
CHUNK = 1024
# Bytes of chunks' sums that are held at a time.
HELD = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
HALF = (torch.bfloat16, torch.float16)


def gram_sum(x: Tensor) -> Tensor:
    """Σ x xᵀ over the rows of x (tokens, d): (d, d), float64.

    Products of half-precision features are exact in float32; they are summed in float32 within a
    chunk of tokens and in float64 over chunks.
    """
    tokens, width = x.shape
    total = torch.zeros((width, width), dtype=torch.float64, device=x.device)
    together = max(1, HELD.get(x.device.type, HELD["cpu"]) // (4 * width * width))
    whole = tokens - tokens % CHUNK
    for part in torch.split(x[:whole].reshape(-1, CHUNK, width), together):
        total += transposed_product(part, part).sum(dim=0, dtype=torch.float64)
    if whole < tokens:
        total += transposed_product(x[whole:], x[whole:])
    return total


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b of (tokens, m) and (tokens, n), or of batches of them; float32 at least."""
    left = a.transpose(-1, -2)
    if a.dtype in HALF and a.device.type == "cuda":
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        product: Tensor = multiply(left, b, out_dtype=torch.float32)
        return product
    if a.dtype in HALF:
        left, b = left.float(), b.float()
    return left @ b


class Moment:
    """Σ x xᵀ as it grows, and the number of tokens in it."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sum: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Count the rows of x (tokens, d)."""
        if x.shape[0] == 0:
            return
        products = gram_sum(x)
        self._sum = products if self._sum is None else self._sum.add_(products)
        self.tokens += x.shape[0]

    def mean(self) -> Tensor | None:
        """(d, d), float32; None before the first token."""
        return None if self._sum is None else (self._sum / self.tokens).float()


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
