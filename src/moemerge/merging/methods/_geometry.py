"""Angles between tensors. Means on the sphere are sums Σ c_i x_i whose coefficients depend on
inner products alone, so one pass gives the Gram matrix and the rest is arithmetic on n numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moemerge.merging.methods._blocks import blocks, flat

# A sum of unit vectors that is shorter than this has no direction: in float32 it is rounding.
NO_DIRECTION = 1e-6
# At sin θ below this, interpolation along the arc is replaced by the chord: they agree to 1e-8
# where the vectors agree, and where they oppose each other every arc is as good.
_FLAT_ARC = 1e-4


def gram(tensors: Sequence[Tensor], origin: Tensor | None = None) -> Tensor:
    """G_ij = x_i·x_j of the tensors (less `origin`), in float64 on the CPU."""
    flats = [flat(t) for t in tensors]
    zero = None if origin is None else flat(origin)
    total = torch.zeros(len(flats), len(flats), dtype=torch.float64, device=flats[0].device)
    for b in blocks(flats[0]):
        rows = torch.stack([x[b] if zero is None else x[b] - zero[b] for x in flats]).double()
        total += rows @ rows.T
    return total.cpu()


def cosine(g: Tensor, i: int, j: int) -> float:
    """The cosine of x_i and x_j from their Gram matrix; a zero vector is orthogonal to all."""
    norms = math.sqrt(g[i, i].item() * g[j, j].item())
    return max(-1.0, min(1.0, g[i, j].item() / norms)) if norms > 0 else 0.0


def arc_coefficients(cosines: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Spherical interpolation: (c_0, c_1) with c_0 x_0 + c_1 x_1 at fraction `t` of the arc."""
    theta = torch.arccos(cosines.clamp(-1, 1))
    sine = torch.sin(theta)
    straight = sine < _FLAT_ARC
    safe = torch.where(straight, 1.0, sine)
    first = torch.where(straight, 1 - t, torch.sin((1 - t) * theta) / safe)
    second = torch.where(straight, t, torch.sin(t * theta) / safe)
    return first, second
