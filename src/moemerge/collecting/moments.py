"""Second moments of inputs: the mathematics of a Gram."""

from __future__ import annotations

import torch
from torch import Tensor

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
        found: Tensor = multiply(left, b, out_dtype=torch.float32)
        return found
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
        found = gram_sum(x)
        self._sum = found if self._sum is None else self._sum.add_(found)
        self.tokens += x.shape[0]

    def mean(self) -> Tensor | None:
        """(d, d), float32; None before the first token."""
        return None if self._sum is None else (self._sum / self.tokens).float()
