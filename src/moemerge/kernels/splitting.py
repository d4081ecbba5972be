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


# Inside a solver, whose directions are `representable` in that many terms to begin with: it has the
# very products of its directions. Two terms cost it no step; with one, directions are conjugate to
# eight bits only, which ends a well-conditioned problem as soon and a hard one hardly ever.
COARSE = Terms(1, 2)
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
