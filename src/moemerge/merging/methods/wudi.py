"""WUDI: a task vector whose interference with every task is least (Cheng et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param, takes
from moemerge.merging.methods._changes import (
    OthersOptions,
    changes,
    is_linear,
    merge_others,
)
from moemerge.merging.methods._polar import Definite
from moemerge.merging.methods._spectra import Spectrum
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# Of the largest singular value: with less, a solve may lose more digits than float32 has.
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
        help="what the result shall be to each model's inputs: its task vector; or, as OptMerge "
        "has it, the mean and the leading directions in which it differs from the mean (fine-tuned "
        "wholly), or its leading directions, from the mean on (LoRA)",
    )
    lr: float = param(1e-5, minimum=0, exclusive_minimum=True, help="Adam's step size")
    steps: int = param(300, minimum=0, help="Adam's number of steps")
    time: float = param(300.0, minimum=0, help="how long the gradient flow of `spectral` runs")
    keep: float = param(
        0.65, minimum=0, maximum=1, help="share of the directions that `spectral` corrects"
    )


@merge_method("wudi", base=BasePolicy.REQUIRED, per_model=NoParams, options=WudiOptions)
@takes("steps")
def wudi(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: WudiOptions, unit: UnitInfo
) -> Tensor:
    """Choose the task vector that interferes least with each model's own inputs.

    Minimises Σ_i ‖(τ - τ_i) τ_iᵀ‖² / ‖τ_i‖² over τ for each linear weight, starting at Σ τ_i;
    the result is θ_0 + τ. Models that did not change the weight are left out. `targets` puts
    OptMerge's in place of the τ_i. `solver: exact` takes the minimum nearest to the start;
    `spectral` and `adaptive` correct its leading directions alone, as Adam's early end does. All
    other tensors are averaged, as fine-tuned norms and embeddings carry what the models learnt;
    `others: base` drops their changes, which is what the HARC paper's authors did.
    """
    assert base is not None
    if not is_linear(base, unit):
        return merge_others(inputs, base, options)
    deltas = changes(inputs, base)
    if not deltas:
        return base.clone(memory_format=torch.contiguous_format)
    if options.solver == "exact":  # float32's rounding of weak directions would be blown up
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
    """Where the search starts, and what is minimised around it."""
    if targets == "task" or len(deltas) == 1:  # a model alone is its own merge
        return torch.stack(deltas).sum(0), Interference.of(deltas)
    mean = torch.stack(deltas).mean(0)
    start = mean if targets == "leading" else torch.stack(deltas).sum(0)
    return start, Interference.reduced(deltas, mean, start, centred=targets == "centred")


class Interference:
    """The objective around its start: x is what is added to it, to Σ τ_i of WUDI.

    With S the τ_i / ‖τ_i‖ on top of each other and C_i = Σ_{j≠i} τ_j, the objective is
    Σ_i ‖(x + C_i) S_iᵀ‖². Its gradient 2 (x SᵀS + G), G = Σ_i C_i S_iᵀ S_i, is a sum without
    cancellation, which Adam's division by the gradient's size would blow up.
    """

    def __init__(self, S: Tensor, K: Tensor) -> None:
        self.S = S  # (models·out, in)
        self.K = K  # (out, models·out): the C_i S_iᵀ side by side; G = K S

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
        """OptMerge's: S_i is diag(s) Vᵀ / ‖τ_i‖ of the ⌊rank / models⌋ leading directions of τ_i,
        and C_i the start less their target: these directions, or the mean and those of τ_i - mean.
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
            # In float64: what cancels must be small beside Adam's ε, or Adam would blow it up.
            rest = rest - (target.left * target.values) @ target.right.T
            unit = (own.values[:, None] * own.right.T) / size  # (directions, in)
            S.append(unit)
            K.append(rest @ unit.T)
        dtype = mean.dtype
        return cls(torch.cat(S).to(dtype), torch.cat(K, dim=1).to(dtype))

    def value(self, x: Tensor) -> float:
        """The objective at the start + x."""
        return float(torch.linalg.vector_norm(x @ self.S.T + self.K) ** 2)

    def gradient(self, x: Tensor) -> Tensor:
        return torch.mm(x @ self.S.T + self.K, self.S).mul_(2)

    def exact(self) -> Tensor:
        """The minimiser of least norm: x = -G (SᵀS)⁺, a solve where that is an inverse."""
        S, K = self.S.double(), self.K.double()
        broad = S.shape[0] <= S.shape[1]
        known = Definite.of(S @ S.T if broad else S.T @ S)
        if not known.surely(_SURELY_DEFINITE):
            return self.filtered(lambda values, count: torch.ones_like(values))
        x = known.solve(K) @ S if broad else known.solve(K @ S)
        return -x.to(self.S.dtype)

    def filtered(self, spectral_filter: SpectralFilter) -> Tensor:
        """-G Σ_k f(λ_k)/λ_k v_k v_kᵀ over the eigenvectors of SᵀS with λ_k > 0, in float64.

        With more columns than rows the eigenvectors of S Sᵀ serve: x = -K P diag(f/λ) Pᵀ S.
        """
        S, K = self.S.double(), self.K.double()
        rows, columns = S.shape
        values, vectors = torch.linalg.eigh(S @ S.T if rows <= columns else S.T @ S)
        # S was made of numbers with float32's precision at best; λ is known to float64's.
        positive = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
        values, vectors = values[positive].flip(0), vectors[:, positive].flip(1)
        gain = spectral_filter(values, columns) / values
        inverse = torch.mm(vectors * gain, vectors.T)
        x = K @ inverse @ S if rows <= columns else K @ S @ inverse
        return -x.to(self.S.dtype)

    def adam(self, lr: float, steps: int, each_step: Callable[[], None] = lambda: None) -> Tensor:
        """x after so many of Adam's steps from x = 0."""
        out, columns = self.K.shape[0], self.S.shape[1]
        G = self.K @ self.S  # (out, in)
        # x SᵀS by whichever association is cheaper: out·in² or 2·models·out²·in products.
        gram = self.S.T @ self.S if columns < 2 * self.S.shape[0] else None
        x, m, v = (torch.zeros_like(G) for _ in range(3))
        g, divisor = torch.empty_like(G), torch.empty_like(G)
        inner = None if gram is not None else G.new_empty(out, self.S.shape[0])
        for step in range(1, steps + 1):
            each_step()
            if gram is not None:
                torch.mm(x, gram, out=g)
            else:
                torch.mm(torch.mm(x, self.S.T, out=inner), self.S, out=g)
            g.add_(G).mul_(2)
            m.lerp_(g, 1 - _BETA1)
            v.mul_(_BETA2).addcmul_(g, g, value=1 - _BETA2)
            torch.sqrt(v, out=divisor).div_(math.sqrt(1 - _BETA2**step)).add_(_EPS)
            x.addcdiv_(m, divisor, value=-lr / (1 - _BETA1**step))
        return x


# Of the positive eigenvalues, descending, and the number of all: how much of each is corrected.
SpectralFilter = Callable[["Tensor", int], "Tensor"]


def gradient_flow(time: float, keep: float) -> SpectralFilter:
    """SWUDI: where gradient flow has come to after `time`, in the leading directions alone."""

    def corrected(values: Tensor, count: int) -> Tensor:
        shares = -torch.expm1(-time * values)
        shares[math.ceil(keep * count) :] = 0.0
        return shares

    return corrected


def effective_rank(values: Tensor, count: int) -> Tensor:
    """ASWUDI: wholly in the (Σ √λ)² / Σ λ leading directions, and not at all in the others."""
    rank = math.ceil(float(values.sqrt().sum() ** 2 / values.sum()))
    shares = torch.zeros_like(values)
    shares[:rank] = 1.0
    return shares
