"""Numbers as sums of bf16 terms: hi = bf16(v), lo = bf16(v − hi), ...

Each term adds eight bits and a product of bf16 numbers is exact in float32, so that a product with
a sum of terms is as good as one with the number they add up to. bf16 has float32's range: nothing
overflows, and what underflows is below 1e-38.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """How many terms a product Σ H (V x) xᵀ takes of V, and of H (V x)."""

    vector: int
    weighted: int


# Inside a solver, whose directions are sums of two bf16 terms to begin with (`representable`): it
# needs no step more for that, and has the very products of its directions. With one term a product
# is cheaper, but ill-conditioned problems no longer come to 1e-6.
FAST = Terms(2, 2)
# Where the result must stand for any V: 24 bits, a float32 whole.
ACCURATE = Terms(3, 3)


def split(values: Tensor, terms: int) -> Tensor:
    """The terms that add up to `values`, largest first; (terms, *shape) bf16."""
    parts, rest = [], values
    for _ in range(terms):
        parts.append(rest.to(torch.bfloat16))
        rest = rest - parts[-1].to(rest.dtype)
    return torch.stack(parts)


def representable(values: Tensor, terms: int) -> Tensor:
    """What `split` keeps of `values`, float64."""
    return split(values.double(), terms).double().sum(dim=0)
