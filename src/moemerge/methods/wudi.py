"""WUDI merging: the task vector that interferes least with each model's inputs (Cheng et al. 2025),
with the variants SWUDI, ASWUDI and OptMerge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from moemerge.methods._spectra import Spectrum
from moemerge.methods.method import Param, Tensors, UnitInfo, merge_method
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's usual constants


@merge_method("wudi", base="required", linear_layers=True, time="steps")
def wudi(
    deltas: Tensors,
    unit: UnitInfo,
    *,
    solver: Annotated[
        Literal["adam", "exact", "spectral", "adaptive"],
        Param(
            "Adam's steps from the sum of task vectors as in the paper, the minimum itself, or "
            "the minimum in its leading directions (SWUDI's gradient flow, ASWUDI's effective rank)"
        ),
    ] = "adam",
    targets: Annotated[
        Literal["task", "centred", "leading"],
        Param(
            "what the result should match on each model's inputs: its task vector; or OptMerge's "
            "targets, the mean plus the leading directions of the difference from it (full "
            "fine-tuning), or the leading directions, starting from the mean (LoRA)"
        ),
    ] = "task",
    lr: Annotated[float, Param("Adam's step size", above=0)] = 1e-5,
    steps: Annotated[int, Param("Adam's number of steps", minimum=0)] = 300,
    time: Annotated[
        float, Param("how long the gradient flow of `spectral` runs", minimum=0)
    ] = 300.0,
    keep: Annotated[
        float, Param("share of the directions that `spectral` corrects", minimum=0, maximum=1)
    ] = 0.65,
) -> Tensor:
    """Choose the task vector that interferes least with each model's own inputs.

    Minimises Σ_i ‖(τ - τ_i) τ_iᵀ‖² / ‖τ_i‖² over τ for each linear weight, starting at Σ τ_i;
    the result is θ_0 + τ. Models that did not change the weight are left out. `targets` replaces
    the τ_i by OptMerge's. `solver: exact` computes the minimum nearest to the start. `spectral` and
    `adaptive` correct only its leading directions, like early stopping of Adam. All other tensors
    are averaged, because fine-tuned norms and embeddings contain what the models learnt.
    `others: base` drops their changes, as the authors of the HARC paper did.
    """
    if solver == "exact":  # float32 rounding of weak directions would be amplified
        deltas = [delta.double() for delta in deltas]
    total = torch.stack([*deltas]).sum(0)
    if targets == "task" or len(deltas) == 1:  # a single model is its own merge
        start, problem = total, Interference.of(deltas)
    else:
        mean = torch.stack([*deltas]).mean(0)
        start = mean if targets == "leading" else total
        problem = Interference.reduced(deltas, mean, start, centred=targets == "centred")
    if solver == "exact":
        return start + problem.filtered(lambda values, count: torch.ones_like(values))
    if solver == "spectral":
        return start + problem.filtered(gradient_flow(time, keep))
    if solver == "adaptive":
        return start + problem.filtered(effective_rank)
    return start + problem.adam(lr, steps, each_step=unit.check_stopped)


@dataclass(frozen=True)
class Interference:
    """The objective as a function of x, the difference from the start (Σ τ_i in WUDI).

    With S the stacked τ_i / ‖τ_i‖ and C_i = Σ_{j≠i} τ_j, the objective is Σ_i ‖(x + C_i) S_iᵀ‖².
    Its gradient 2 (x SᵀS + G), G = Σ_i C_i S_iᵀ S_i, is a sum without cancellation. Adam divides by
    the gradient's size, which would amplify cancellation errors.
    """

    S: Tensor  # (models·out, in)
    K: Tensor  # (out, models·out): the concatenated C_i S_iᵀ; G = K S

    @classmethod
    def of(cls, deltas: Sequence[Tensor]) -> Interference:
        S = [d / torch.linalg.vector_norm(d) for d in deltas]
        K = []
        for i, unit in enumerate(S):
            others = torch.zeros_like(unit)
            for j, delta in enumerate(deltas):
                if j != i:
                    others += delta
            K.append(others @ unit.T)
        return cls(torch.cat(S), torch.cat(K, dim=1))

    @classmethod
    def reduced(
        cls, deltas: Sequence[Tensor], mean: Tensor, start: Tensor, *, centred: bool
    ) -> Interference:
        """Return OptMerge's objective.

        S_i is diag(s) Vᵀ / ‖τ_i‖ of the ⌊rank / models⌋ leading directions of τ_i. C_i is the start
        minus the target: these directions, or the mean plus those of τ_i - mean.
        """
        share = max(1, min(mean.shape) // len(deltas))
        S, K = [], []
        for delta in deltas:
            size = torch.linalg.vector_norm(delta.double())
            own = Spectrum.of(delta, most=share)
            target = own
            rest = start.double()
            if centred:
                target = Spectrum.of(delta - mean, float(size), share)
                rest = rest - mean
            # In float64: cancellation errors must be small compared with Adam's ε.
            rest = rest - (target.left * target.values) @ target.right.T
            unit = (own.values[:, None] * own.right.T) / size  # (directions, in)
            S.append(unit)
            K.append(rest @ unit.T)
        dtype = mean.dtype
        return cls(torch.cat(S).to(dtype), torch.cat(K, dim=1).to(dtype))

    def filtered(self, spectral_filter: SpectralFilter) -> Tensor:
        """Return -G Σ_k f(λ_k)/λ_k v_k v_kᵀ over eigenvectors of SᵀS with λ_k > 0, in float64.

        With more columns than rows it uses those of S Sᵀ: x = -K P diag(f/λ) Pᵀ S.
        """
        S, K = self.S.double(), self.K.double()
        rows, columns = S.shape
        values, vectors = torch.linalg.eigh(S @ S.T if rows <= columns else S.T @ S)
        # The values of S have float32 precision at best; λ has float64 precision.
        positive = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
        values, vectors = values[positive].flip(0), vectors[:, positive].flip(1)
        gain = spectral_filter(values, columns) / values
        inverse = torch.mm(vectors * gain, vectors.T)
        x = K @ inverse @ S if rows <= columns else K @ S @ inverse
        return -x.to(self.S.dtype)

    def adam(self, lr: float, steps: int, each_step: Callable[[], None] = lambda: None) -> Tensor:
        """Return x after `steps` Adam steps from x = 0."""
        G = self.K @ self.S  # (out, in)
        # Compute x SᵀS in the cheaper order: out·in² or 2·models·out²·in multiplications.
        gram = self.S.T @ self.S if self.S.shape[1] < 2 * self.S.shape[0] else None

        def gradient(x: Tensor) -> Tensor:
            product = torch.mm(x @ self.S.T, self.S) if gram is None else torch.mm(x, gram)
            return product.add_(G).mul_(2)

        return adam(gradient, G, lr, steps, each_step)


def adam(
    gradient: Callable[[Tensor], Tensor],
    like: Tensor,
    lr: float,
    steps: int,
    each_step: Callable[[], None],
) -> Tensor:
    """Return x, shaped as `like`, after `steps` Adam steps from x = 0."""
    x, m, v = (torch.zeros_like(like) for _ in range(3))
    for step in range(1, steps + 1):
        each_step()
        g = gradient(x)
        m.lerp_(g, 1 - _BETA1)
        v.mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
        divisor = v.sqrt().div_(math.sqrt(1 - _BETA2**step)).add_(_EPS)
        x.addcdiv_(m, divisor, value=-lr / (1 - _BETA1**step))
    return x


# (positive eigenvalues in descending order, number of all) -> fraction of each that is corrected
SpectralFilter = Callable[["Tensor", int], "Tensor"]


def gradient_flow(time: float, keep: float) -> SpectralFilter:
    """Return SWUDI's filter: gradient flow up to `time`, in the leading directions."""

    def corrected(values: Tensor, count: int) -> Tensor:
        shares = -torch.expm1(-time * values)
        shares[math.ceil(keep * count) :] = 0.0
        return shares

    return corrected


def effective_rank(values: Tensor, count: int) -> Tensor:
    """Return ASWUDI's filter: 1 in the (Σ √λ)² / Σ λ leading directions, 0 in the others."""
    rank = math.ceil(float(values.sqrt().sum() ** 2 / values.sum()))
    shares = torch.zeros_like(values)
    shares[:rank] = 1.0
    return shares
