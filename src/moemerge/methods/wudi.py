"""Task vectors found by gradient steps: WUDI (Cheng et al. 2025) and DOGE (Wei et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.methods._arithmetic import flat
from moemerge.methods._selection import keep_largest_, kept_count
from moemerge.methods._spectra import Definite, Spectrum
from moemerge.methods._task_vectors import OthersOptions, of_task_vectors
from moemerge.methods.method import UnitInfo, merge_method, param
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Relative to the largest singular value: below it, a solve may lose more digits than float32 has.
_SURELY_DEFINITE = 1e-5
_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's usual constants


@dataclass(frozen=True)
class WudiOptions(OthersOptions):
    solver: str = param(
        "adam",
        choices=("adam", "exact", "spectral", "adaptive"),
        help="Adam's steps from the sum of task vectors as in the paper, the minimum itself, or "
        "the minimum in its leading directions (SWUDI's gradient flow, ASWUDI's effective rank)",
    )
    targets: str = param(
        "task",
        choices=("task", "centred", "leading"),
        help="what the result should match on each model's inputs: its task vector; or OptMerge's "
        "targets, the mean plus the leading directions of the difference from it (full "
        "fine-tuning), or the leading directions, starting from the mean (LoRA)",
    )
    lr: float = param(1e-5, minimum=0, exclusive_minimum=True, help="Adam's step size")
    steps: int = param(300, minimum=0, help="Adam's number of steps")
    time: float = param(300.0, minimum=0, help="how long the gradient flow of `spectral` runs")
    keep: float = param(
        0.65, minimum=0, maximum=1, help="share of the directions that `spectral` corrects"
    )


@merge_method("wudi", base=BasePolicy.REQUIRED, options=WudiOptions, time="steps")
@of_task_vectors
def wudi(base: Tensor, deltas: list[Tensor], options: WudiOptions, unit: UnitInfo) -> Tensor:
    """Choose the task vector that interferes least with each model's own inputs.

    Minimises Σ_i ‖(τ - τ_i) τ_iᵀ‖² / ‖τ_i‖² over τ for each linear weight, starting at Σ τ_i;
    the result is θ_0 + τ. Models that did not change the weight are left out. `targets` replaces
    the τ_i by OptMerge's. `solver: exact` computes the minimum nearest to the start. `spectral` and
    `adaptive` correct only its leading directions, like early stopping of Adam. All other tensors
    are averaged, because fine-tuned norms and embeddings contain what the models learnt.
    `others: base` drops their changes, as the authors of the HARC paper did.
    """
    if options.solver == "exact":  # float32 rounding of weak directions would be amplified
        deltas = [delta.double() for delta in deltas]
    start, problem = _problem(deltas, options.targets)
    if options.solver == "exact":
        correction = problem.exact()
    elif options.solver == "spectral":
        correction = problem.filtered(gradient_flow(options.time, options.keep))
    elif options.solver == "adaptive":
        correction = problem.filtered(effective_rank)
    else:
        correction = problem.adam(options.lr, options.steps, each_step=unit.check_stopped)
    return (base + start + correction).to(base.dtype).contiguous()


def _problem(deltas: list[Tensor], targets: str) -> tuple[Tensor, Interference]:
    """Return the start of the search and the objective around it."""
    if targets == "task" or len(deltas) == 1:  # a single model is its own merge
        return torch.stack(deltas).sum(0), Interference.of(deltas)
    mean = torch.stack(deltas).mean(0)
    start = mean if targets == "leading" else torch.stack(deltas).sum(0)
    return start, Interference.reduced(deltas, mean, start, centred=targets == "centred")


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

    def exact(self) -> Tensor:
        """Return the minimum-norm minimiser x = -G (SᵀS)⁺, by a solve if SᵀS is invertible."""
        S, K = self.S.double(), self.K.double()
        broad = S.shape[0] <= S.shape[1]
        known = Definite.of(S @ S.T if broad else S.T @ S)
        if not known.surely(_SURELY_DEFINITE):
            return self.filtered(lambda values, count: torch.ones_like(values))
        x = known.solve(K) @ S if broad else known.solve(K @ S)
        return -x.to(self.S.dtype)

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


_SUBSPACE = 6  # the shared subspace has a sixth of the directions


@dataclass(frozen=True)
class DogeOptions(OthersOptions):
    eta: float = param(0.07, minimum=0, help="size that every model's task vector is scaled to")
    density: float = param(
        0.3, minimum=0, maximum=1, help="fraction of each task vector's elements that is kept"
    )
    lr: float = param(1e-4, minimum=0, exclusive_minimum=True, help="Adam's step size")
    steps: int = param(400, minimum=0, help="Adam's number of steps")


@merge_method("doge", base=BasePolicy.REQUIRED, options=DogeOptions, time="steps")
@of_task_vectors
def doge(base: Tensor, vectors: list[Tensor], options: DogeOptions, unit: UnitInfo) -> Tensor:
    """Add task vectors of equal size, corrected for conflicts outside their shared subspace.

    With l_i = eta / ‖τ_i‖ and P the leading directions of all models' leading left singular
    vectors, Adam minimises Σ_j ‖diag((τ_j - Σ l_i τ_i - Δ Σ l_i) τ_jᵀ)‖² over Δ with gradients
    projected by I - P Pᵀ; the result is θ_0 + Σ l_i (τ_i + Δ) on each model's largest elements.
    The mask is per unit; the paper's is over the whole model.
    """
    scales = [options.eta / float(torch.linalg.vector_norm(v)) for v in vectors]
    correction = _correction(vectors, scales, options, unit)
    result = base.clone(memory_format=torch.contiguous_format)
    for vector, scale in zip(vectors, scales, strict=True):
        kept = flat(vector).clone()
        keep_largest_(kept, kept_count(options.density, kept.numel()))
        mask = (kept != 0).view(base.shape)
        result += scale * (vector + correction) * mask
    return result


def _correction(
    vectors: Sequence[Tensor], scales: Sequence[float], options: DogeOptions, unit: UnitInfo
) -> Tensor:
    """Return Δ, (out, in), after `steps` Adam steps from 0."""
    P = _shared_subspace(vectors).to(vectors[0].dtype)  # (out, directions)
    total = sum(scales)
    merged = sum(s * v for s, v in zip(scales, vectors, strict=True))
    # e_j = rowwise ⟨τ_j - Σ l τ - Δ Σ l, τ_j⟩; only the inner product with Δ changes.
    start = [((v - merged) * v).sum(1) for v in vectors]

    def gradient(delta: Tensor) -> Tensor:
        g = torch.zeros_like(delta)
        for vector, e in zip(vectors, start, strict=True):
            residual = e - total * (delta * vector).sum(1)
            g.addcmul_(residual[:, None], vector, value=-2 * total)
        return g.sub_(P @ (P.T @ g))

    return adam(gradient, vectors[0], options.lr, options.steps, unit.check_stopped)


def _shared_subspace(vectors: Sequence[Tensor]) -> Tensor:
    rank = min(vectors[0].shape)
    share = max(1, rank // len(vectors))
    leading = torch.cat([Spectrum.of(v, most=share).left for v in vectors], dim=1)
    return Spectrum.of(leading, most=rank // _SUBSPACE).left
