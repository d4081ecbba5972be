"""TSV-M: merge the singular directions of task vectors (Gargiulo et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moemerge.methods._spectra import Spectrum, nearest_orthogonal
from moemerge.methods.method import Lambda, Tensors, UnitInfo, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_method("tsv", base="required", linear_layers=True, time="decompositions")
def tsv(deltas: Tensors, unit: UnitInfo, *, lambda_: Lambda = 1.0) -> Tensor:
    """Give each model an equal share of the singular directions, and make them orthogonal.

    With τ_i = U_i diag(s_i) V_iᵀ cut to its k = ⌊rank / models⌋ leading directions and U, V the
    polar factors of [U_1 … U_T] and [V_1 … V_T], the result is θ_0 + λ U diag(s_1 … s_T) Vᵀ.
    Models that did not change the weight are left out; their share goes to the others.
    """
    share = max(1, min(deltas[0].shape) // len(deltas))
    spectra = [Spectrum.of(delta, most=share) for delta in deltas]
    unit.check_stopped()
    left = nearest_orthogonal(torch.cat([spectrum.left for spectrum in spectra], dim=1))
    right = nearest_orthogonal(torch.cat([spectrum.right for spectrum in spectra], dim=1))
    values = torch.cat([spectrum.values for spectrum in spectra])
    return lambda_ * (left * values) @ right.T
