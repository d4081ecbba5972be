"""RAM and RAM+: keep changes of one model alone, average shared ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from moemerge.methods.method import Param, Tensors, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Epsilon = Annotated[float, Param("a change counts beyond this size", minimum=0)]


@merge_method("ram", base="required", elementwise=True)
def ram(deltas: Tensors, *, epsilon: Epsilon = 1e-5) -> Tensor:
    """Keep changes of one model alone, average changes that several made.

    Element by element, over the models with |δ_i| > epsilon: θ_0 + mean δ_i. Intended for models
    trained by reinforcement learning, whose changes are sparse.
    """
    return _by_overlap(deltas, epsilon, [1.0] * len(deltas))


@merge_method("ramplus_tl", base="required")
def ramplus_tl(
    deltas: Tensors,
    *,
    epsilon: Epsilon = 1e-5,
    r: Annotated[float, Param("gain on changes that a model alone made", minimum=0)] = 0.1,
    alpha: Annotated[
        float, Param("upper limit of the ratio of shared to own changes", minimum=0)
    ] = 0.2,
) -> Tensor:
    """As `ram`, with each model's own changes amplified, more so the more changes it shares.

    Elements that model i alone changed are multiplied by 1 + r·min(shared_i / own_i, alpha), with
    the numbers of elements of this tensor that it changed together with others, and alone.
    """
    changed = [delta.abs() > epsilon for delta in deltas]
    count = torch.stack(changed).sum(0)
    gains = []
    for mask in changed:
        own = int((mask & (count == 1)).sum())
        shared = int((mask & (count > 1)).sum())
        gains.append(1 + r * min(shared / own if own else 0.0, alpha))
    return _by_overlap(deltas, epsilon, gains)


def _by_overlap(deltas: Tensors, epsilon: float, gains: Sequence[float]) -> Tensor:
    """Return the merged change; `gains` multiply changes that one model alone made."""
    total, own, count = (torch.zeros_like(deltas[0]) for _ in range(3))
    for delta, gain in zip(deltas, gains, strict=True):
        changed = delta.abs() > epsilon
        total += delta * changed
        own.add_(delta * changed, alpha=gain)
        count += changed
    return torch.where(count > 1, total / count.clamp_min(1), own)
