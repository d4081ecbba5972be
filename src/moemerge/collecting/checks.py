"""Weights that cannot have given sound statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moemerge.errors import NumericalError
from moemerge.features.taps import ExpertsTap, LinearTap


def require_finite_weights(
    model: nn.Module, taps: Sequence[LinearTap | ExpertsTap], label: str
) -> None:
    """Refuse NaN and infinity in the linear maps of a layer that is in memory.

    Fused attention may take NaN for a masked place, so hidden states do not always show it. What
    an expert makes of its tokens does; one that none came to is no harm here.
    """
    found = {tap.weight: _weight(model, tap) for tap in taps if isinstance(tap, LinearTap)}
    weights = {name: weight for name, weight in found.items() if not weight.is_meta}
    if not weights:
        return
    # A finite sum has only finite terms; one wait for the device a layer.
    sums = torch.stack([w.sum(dtype=torch.float32) for w in weights.values()])
    if bool(sums.isfinite().all()):
        return
    bad = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    if bad:
        raise NumericalError(
            f"{label}: {', '.join(bad)} holds NaN or infinity",
            hint="repair that model; if it is sound on disk, it overflows: try --dtype float32",
        )


def _weight(model: nn.Module, tap: LinearTap) -> Tensor:
    path, _, leaf = tap.weight.rpartition(".")
    weight: Tensor = getattr(model.get_submodule(path), leaf)
    return weight
