"""Which modules write to the hidden state, and how: told from what a layer did, not from its name.

A layer h → h' is a sum: h' = h + Σ_j a_j o_j, with o_j the outputs of its attention's and experts'
last maps. a_j is 1 in most families, a constant of the config in some (a residual multiplier, a
scale of routed experts), and for a shared expert it may be the sigmoid of a map with one output.
All of that can be read off one batch by least squares. Where the sum does not come out (a norm
stands between a map and the hidden state, say), no map of the layer writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding of the hidden state counts with this many units in the last place.
ULPS = 4.0
# Beyond rounding, this share of the layer's own change may be missed (root mean square).
MISSED = 1e-4
# Tokens that are looked at.
PROBED = 2048
# A module that contributes less than this share of the change writes elsewhere.
NOTHING = 1e-3
# A coefficient this near to 1 is 1.
SNAP = 5e-3


@dataclass(frozen=True)
class ResidualWrite:
    """A module adds `factor` times its output, or that times the sigmoid of `gate`'s output."""

    path: str
    factor: float
    gate: str | None = None


def find_writes(
    entered: Tensor,
    left: Tensor,
    outputs: Mapping[str, Tensor],
    gates: Mapping[str, Tensor],
) -> tuple[ResidualWrite, ...] | None:
    """In the order of `outputs`; None where the layer is no such sum.

    All tensors are (tokens, d), but `gates`, which are (tokens, 1).
    """
    entered, left = entered[:PROBED], left[:PROBED]
    outputs = {path: out[:PROBED] for path, out in outputs.items()}
    gates = {path: z[:PROBED] for path, z in gates.items()}
    columns: list[tuple[str, str | None, Tensor]] = []
    for path, out in outputs.items():
        if out.shape != left.shape:
            continue
        columns.append((path, None, out))
        columns += [(path, gate, torch.sigmoid(z.float()) * out) for gate, z in gates.items()]
    change = left.double() - entered.double()
    size = change.square().mean().sqrt()
    if not columns or entered.shape != left.shape or float(size) == 0.0:
        return None
    eps = torch.finfo(left.dtype).eps
    largest = torch.maximum(entered.abs(), left.abs()).double()
    noise = ULPS * eps * (largest + size) + MISSED * size
    weighted = change / noise
    while True:
        factors = _solve([column / noise for _, _, column in columns], weighted)
        shares = [
            abs(f) * float((column.double() / noise).norm()) / float(weighted.norm())
            for f, (_, _, column) in zip(factors, columns, strict=True)
        ]
        kept = [at for at, share in enumerate(shares) if share > NOTHING]
        if len(kept) == len(columns):
            break
        if not kept:
            return None
        columns = [columns[at] for at in kept]
    factors = [1.0 if abs(f - 1.0) < SNAP else f for f in factors]
    rest = change - sum(
        f * column.double() for f, (_, _, column) in zip(factors, columns, strict=True)
    )
    paths = [path for path, _, _ in columns]
    if float((rest / noise).square().mean()) > 1.0 or len(set(paths)) != len(paths):
        return None
    return tuple(
        ResidualWrite(path, factor, gate)
        for factor, (path, gate, _) in zip(factors, columns, strict=True)
    )


def _solve(columns: Sequence[Tensor], wanted: Tensor) -> list[float]:
    """Least squares by the normal equations of a handful of unknowns."""
    flat = torch.stack([column.double().reshape(-1) for column in columns])  # (unknowns, n)
    gram = flat @ flat.T
    right = flat @ wanted.reshape(-1)
    solution: list[float] = (
        torch.linalg.lstsq(gram.cpu(), right.cpu()[:, None]).solution[:, 0].tolist()
    )
    return solution
