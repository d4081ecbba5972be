"""TSV-M: the models' leading singular vectors, made orthogonal (Gargiulo et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, takes
from moemerge.merging.methods._spectra import Spectrum, orthogonal_sides
from moemerge.merging.methods._task_vectors import (
    SpectralOptions,
    changes,
    is_linear,
    merge_others,
)
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("tsv", base=BasePolicy.REQUIRED, per_model=NoParams, options=SpectralOptions)
@takes("decompositions")
def tsv(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: SpectralOptions, unit: UnitInfo
) -> Tensor:
    """Give each model an equal share of the singular directions, and make them orthogonal.

    With τ_i = U_i diag(s_i) V_iᵀ cut to its k = ⌊rank / models⌋ leading directions and U, V the
    polar factors of [U_1 … U_T] and [V_1 … V_T], the result is θ_0 + λ U diag(s_1 … s_T) Vᵀ.
    Models that did not change the weight are left out; their share goes to the others.
    """
    assert base is not None
    if not is_linear(base, unit):
        return merge_others(inputs, base, options)
    vectors = changes(inputs, base)
    if not vectors:
        return base.clone(memory_format=torch.contiguous_format)
    share = max(1, min(base.shape) // len(vectors))
    spectra = [Spectrum.of(vector, most=share) for vector in vectors]
    unit.check_stopped()
    left, right = orthogonal_sides(spectra)
    merged = (left * torch.cat([s.values for s in spectra])) @ right.T
    return (base + options.lambda_ * merged).to(base.dtype).contiguous()
