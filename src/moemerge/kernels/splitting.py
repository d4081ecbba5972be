"""Numbers as sums of bf16 terms: hi = bf16(v), lo = bf16(v − hi), ...

Each term adds eight bits, and a product of bf16 numbers is exact in float32. A product with the
terms is therefore as accurate as one with their sum. bf16 has float32's range: nothing overflows,
and only values below 1e-38 underflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Number of terms of V and of H (V x) in a product Σ H (V x) xᵀ."""

    vector: int
    weighted: int


# For a solver whose directions are `representable` in this number of terms: the products are exact
# for these directions. Two terms cost no additional step. With one, directions are conjugate to
# eight bits only: enough for a well-conditioned problem, rarely for an ill-conditioned one.
COARSE = Terms(1, 2)
FAST = Terms(2, 2)
# If the result must be accurate for any V: 24 bits, all of a float32.
ACCURATE = Terms(3, 3)


def split(values: Tensor, terms: int) -> Tensor:
    """Return the terms that add up to `values`, largest first: (terms, *shape) bf16."""
    parts, rest = [], values
    for _ in range(terms):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].to(rest.dtype)
    return torch.stack(parts)


def representable(values: Tensor, terms: int) -> Tensor:
    """Return the sum of the terms of `values`, in float64."""
    return split(values.double(), terms).double().sum(dim=0)
