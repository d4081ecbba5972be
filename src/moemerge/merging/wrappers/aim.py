"""AIM: weights with active inputs in the base change less (Heyrani Nobari et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.merging.method import ModelTensor, UnitInfo, param
from moemerge.merging.wrapper import Inner, merge_wrapper

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class AimOptions:
    omega: float = param(
        0.4, minimum=0, maximum=1, help="fraction of the change that the most active input keeps"
    )


@merge_wrapper("aim", options=AimOptions, statistics="activation")
def aim(
    inner: Inner,
    inputs: Sequence[ModelTensor],
    base: ModelTensor,
    options: AimOptions,
    unit: UnitInfo,
) -> Tensor:
    """Let the merge change a weight the less, the more active its input is in the base.

    With D the merged change and s the mean |x| of each input channel in the base on general text,
    divided by its largest: θ_0 + D diag(1 - (1 - ω) s). Units without input statistics (norms,
    embeddings), and experts that no token of the base reached, keep the merged weights.
    """
    merged = inner(inputs, base.tensor)
    known = base.statistics
    if known is None or known.tokens == 0:
        return merged
    activity = known.values.to(merged.dtype)  # (in,)
    largest = float(activity.max())
    if largest <= 0:
        return merged
    kept = 1 - (1 - options.omega) * (activity / largest)
    return base.tensor + (merged - base.tensor) * kept
