"""KnOTS: merge task vectors in a shared basis (Stoica et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moemerge.merging.method import ModelTensor, NoParams, UnitInfo
from moemerge.merging.methods._spectra import Spectrum
from moemerge.merging.methods._task_vectors import is_linear
from moemerge.merging.wrapper import Inner, merge_wrapper
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@merge_wrapper("knots", turns=True)
def knots(
    inner: Inner,
    inputs: Sequence[ModelTensor],
    base: ModelTensor,
    options: NoParams,
    unit: UnitInfo,
) -> Tensor:
    """Merge the models' changes in the output basis that all of them share.

    [τ_1 | … | τ_T] = U diag(s) [V_1ᵀ | … | V_Tᵀ]; the method merges the diag(s) V_iᵀ, with zeros as
    the base, and U maps the result back. Sums are unaffected; trimming and sign elections are not.
    Tensors other than linear layers are merged as without it.
    """
    if not is_linear(base.tensor, unit):
        return inner(inputs, base.tensor)
    vectors = [(i.tensor - base.tensor).double() for i in inputs]
    basis = Spectrum.of(torch.cat(vectors, dim=1)).left  # (out, rank)
    if not basis.shape[1]:
        return base.tensor.clone(memory_format=torch.contiguous_format)
    dtype = base.tensor.dtype
    aligned = [
        replace(i, tensor=(basis.T @ vector).to(dtype).contiguous())  # diag(s) V_iᵀ: (rank, in)
        for i, vector in zip(inputs, vectors, strict=True)
    ]
    merged = inner(aligned, torch.zeros_like(aligned[0].tensor))
    return (base.tensor + basis @ merged.double()).to(dtype).contiguous()
