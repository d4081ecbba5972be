"""Merges of singular directions: isotropic merging (Marczak et al.), TSV-M (Gargiulo et al.), OPCM
(Tang et al.) and LoRE (Liu et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.methods._arithmetic import average
from moemerge.methods._spectra import Spectrum, flattened, orthogonal_sides
from moemerge.methods._task_vectors import (
    SpectralOptions,
    is_linear,
    of_task_vectors,
)
from moemerge.methods.method import ModelTensor, UnitInfo, merge_method, param
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class IsoCtsOptions(SpectralOptions):
    common: float = param(
        0.8, minimum=0, maximum=1, help="share of the directions that the models have in common"
    )


@merge_method("iso_c", base=BasePolicy.REQUIRED, options=SpectralOptions, time="decompositions")
@of_task_vectors
def iso_c(base: Tensor, vectors: list[Tensor], options: SpectralOptions, unit: UnitInfo) -> Tensor:
    """Add up the task vectors, and give every singular direction the mean strength.

    With Σ τ_i = U diag(s) Vᵀ the result is θ_0 + λ mean(s) U Vᵀ. Only directions within the
    numerical rank count: a low-rank update (LoRA) is not filled up with noise. If only one model
    changed a weight, its change is used unmodified.
    """
    if len(vectors) < 2:
        return (base + options.lambda_ * vectors[0]).contiguous()
    merged = flattened(torch.stack(vectors).sum(0))
    if merged is None:
        return base.clone(memory_format=torch.contiguous_format)
    return (base + options.lambda_ * merged).to(base.dtype).contiguous()


@merge_method("iso_cts", base=BasePolicy.REQUIRED, options=IsoCtsOptions, time="decompositions")
@of_task_vectors
def iso_cts(base: Tensor, vectors: list[Tensor], options: IsoCtsOptions, unit: UnitInfo) -> Tensor:
    """As `iso_c`, with some directions reserved for each model alone.

    The leading `common` share of the directions of Σ τ_i = U_c diag(s) V_cᵀ stays; the rest is
    filled, in equal parts, with the leading directions of each (I - U_c U_cᵀ) τ_i. Both sides are
    made orthogonal (polar factors), and all directions get the mean strength.
    """
    if len(vectors) < 2:
        return (base + options.lambda_ * vectors[0]).contiguous()
    rank = min(base.shape)
    own = round((1 - options.common) * rank / len(vectors))
    shared = Spectrum.of(torch.stack(vectors).sum(0), most=rank - own * len(vectors))
    spectra = [shared]
    for vector in vectors:
        unit.check_stopped()
        spectra.append(_outside(shared, vector.double(), own))
    values = torch.cat([s.values for s in spectra])
    if not len(values):
        return base.clone(memory_format=torch.contiguous_format)
    left, right = orthogonal_sides(spectra)
    merged = values.mean() * (left @ right.T)
    return (base + options.lambda_ * merged).to(base.dtype).contiguous()


def _outside(shared: Spectrum, tau: Tensor, most: int) -> Spectrum:
    """Return the leading directions of (I - U_c U_cᵀ) τ, in a basis of that space if known."""
    if not most:
        return Spectrum(tau[:, :0], tau[0, :0], tau.T[:, :0])
    size = float(torch.linalg.vector_norm(tau))
    if shared.rest is None:
        return Spectrum.of(tau - shared.left @ (shared.left.T @ tau), size, most)
    inside = Spectrum.of(shared.rest.T @ tau, size, most)
    return Spectrum(shared.rest @ inside.left, inside.values, inside.right)


@merge_method("tsv", base=BasePolicy.REQUIRED, options=SpectralOptions, time="decompositions")
@of_task_vectors
def tsv(base: Tensor, vectors: list[Tensor], options: SpectralOptions, unit: UnitInfo) -> Tensor:
    """Give each model an equal share of the singular directions, and make them orthogonal.

    With τ_i = U_i diag(s_i) V_iᵀ cut to its k = ⌊rank / models⌋ leading directions and U, V the
    polar factors of [U_1 … U_T] and [V_1 … V_T], the result is θ_0 + λ U diag(s_1 … s_T) Vᵀ.
    Models that did not change the weight are left out; their share goes to the others.
    """
    share = max(1, min(base.shape) // len(vectors))
    spectra = [Spectrum.of(vector, most=share) for vector in vectors]
    unit.check_stopped()
    left, right = orthogonal_sides(spectra)
    merged = (left * torch.cat([s.values for s in spectra])) @ right.T
    return (base + options.lambda_ * merged).to(base.dtype).contiguous()


@dataclass(frozen=True)
class OpcmOptions(SpectralOptions):
    alpha: float = param(
        0.5,
        minimum=0,
        maximum=1,
        help="share of the singular values' sum that protected directions hold at most",
    )


@merge_method("opcm", base=BasePolicy.REQUIRED, options=OpcmOptions, time="decompositions")
@of_task_vectors
def opcm(base: Tensor, vectors: list[Tensor], options: OpcmOptions, unit: UnitInfo) -> Tensor:
    """Add task vectors one after another, each without its overlap with the sum so far.

    With the sum so far Δ = U diag(s) Vᵀ, the next τ loses the part U M Vᵀ: M is Uᵀ τ V in the block
    of the leading directions and on the diagonal, 0 elsewhere. The result is
    θ_0 + λ Δ mean(‖τ_i‖) / ‖Δ‖: the paper's factors of single steps cancel.
    """
    if len(vectors) < 2:
        return (base + options.lambda_ * vectors[0]).contiguous()
    total = vectors[0].double()
    for vector in vectors[1:]:
        unit.check_stopped()
        total = total + _without_overlap(vector.double(), Spectrum.of(total), options.alpha)
    size = sum(float(vector.double().norm()) for vector in vectors) / len(vectors)
    factor = options.lambda_ * size / float(total.norm())
    return (base + factor * total).to(base.dtype).contiguous()


def _without_overlap(tau: Tensor, known: Spectrum, alpha: float) -> Tensor:
    """Return a task vector without its overlap with the directions of the sum so far."""
    sums = known.values.cumsum(0)
    leading = int((sums <= alpha * sums[-1]).sum())
    inside = known.left.T @ tau @ known.right
    overlap = torch.diag(inside.diagonal())
    overlap[:leading, :leading] = inside[:leading, :leading]
    return tau - known.left @ overlap @ known.right.T


@dataclass(frozen=True)
class LoreOptions:
    mu: float = param(0.01, minimum=0, help="penalty on the changes' squared nuclear norm")
    iterations: int = param(10, minimum=1, help="alternating updates of base and changes")
    lambda_: float = param(1.0, key="lambda", help="factor on the sum of the low-rank changes")


@merge_method("lore", base=BasePolicy.DONOR, options=LoreOptions, time="decompositions")
def lore(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: LoreOptions, unit: UnitInfo
) -> Tensor:
    """Split the models into a common base and low-rank changes; add the changes to that base.

    Minimises Σ ‖β + δ_i - θ_i‖² + mu ‖δ_i‖_*² over β and the δ_i in turn, from β = mean θ_i. The
    result is β + λ Σ δ_i; with two models it is their average. Needs no base model. All tensors
    other than linear layers are averaged.
    """
    tensors, mean = [i.tensor for i in inputs], average(inputs)
    # With two models the changes are always each other's negatives and cancel.
    if not is_linear(mean, unit) or len(tensors) < 3:
        return mean
    common, low_rank = mean.double(), [torch.zeros_like(mean, dtype=torch.float64)] * len(tensors)
    for _ in range(options.iterations):
        unit.check_stopped()
        low_rank = [_shrunk(t.double() - common, options.mu) for t in tensors]
        common = torch.stack([t.double() - d for t, d in zip(tensors, low_rank, strict=True)]).mean(
            0
        )
    return (common + options.lambda_ * torch.stack(low_rank).sum(0)).to(mean.dtype).contiguous()


def _shrunk(matrix: Tensor, mu: float) -> Tensor:
    """Return argmin_δ ‖matrix - δ‖² + mu ‖δ‖_*²: subtract mu ‖δ‖_* from the singular values."""
    spectrum = Spectrum.of(matrix)
    if not len(spectrum.values):
        return torch.zeros_like(matrix)
    sums = spectrum.values.cumsum(0)
    count = torch.arange(1, len(sums) + 1, dtype=sums.dtype, device=sums.device)
    nuclear = sums / (1 + mu * count)  # ‖δ‖_* if `count` values remain
    kept = max(1, int((spectrum.values > mu * nuclear).sum()))
    values = (spectrum.values[:kept] - mu * nuclear[kept - 1]).clamp_min(0)
    return (spectrum.left[:, :kept] * values) @ spectrum.right[:, :kept].T
