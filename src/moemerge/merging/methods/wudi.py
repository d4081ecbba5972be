"""WUDI: a task vector whose interference with every task is least (Cheng et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.architectures.roles import Role
from moemerge.config.parameters import BasePolicy
from moemerge.merging.method import ModelTensor, NoParams, UnitInfo, merge_method, param
from moemerge.merging.methods._blocks import weighted_sum

# Matrices that are no linear layers: the objective's argument, that the rows of a task vector
# span the layer's inputs, does not hold for them.
_NOT_LINEAR = frozenset({Role.NORM, Role.EMBEDDING, Role.HEAD})

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8  # Adam's usual constants


@dataclass(frozen=True)
class WudiOptions:
    solver: str = param(
        "adam",
        choices=("adam", "exact"),
        help="Adam's steps from the sum of task vectors as in the paper, or the minimum itself",
    )
    lr: float = param(1e-5, minimum=0, exclusive_minimum=True, help="Adam's step size")
    steps: int = param(300, minimum=0, help="Adam's number of steps")
    others: str = param(
        "average",
        choices=("average", "base"),
        help="norms, embeddings, heads and biases: average of the models, or the base's own",
    )


@merge_method("wudi", base=BasePolicy.REQUIRED, per_model=NoParams, options=WudiOptions)
def wudi(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: WudiOptions, unit: UnitInfo
) -> Tensor:
    """Choose the task vector that interferes least with each model's own inputs.

    Minimises Σ_i ‖(τ - τ_i) τ_iᵀ‖² / ‖τ_i‖² over τ for each linear weight, starting at Σ τ_i;
    the result is θ_0 + τ. Models that did not change the weight are left out. `solver: exact`
    takes the minimum nearest to the start. All other tensors are averaged, as fine-tuned norms
    and embeddings carry what the models learnt; `others: base` drops their changes, which is what
    the HARC paper's authors did.
    """
    assert base is not None
    if base.dim() != 2 or unit.role in _NOT_LINEAR:
        if options.others == "base":
            return base.clone(memory_format=torch.contiguous_format)
        share = 1 / len(inputs)
        return weighted_sum([i.tensor for i in inputs], [share] * len(inputs))
    deltas = [i.tensor - base for i in inputs]
    deltas = [d for d in deltas if float(torch.linalg.vector_norm(d)) > 0]
    if not deltas:
        return base.clone(memory_format=torch.contiguous_format)
    start = torch.stack(deltas).sum(0)
    problem = Interference.of(deltas)
    if options.solver == "exact":
        correction = problem.exact()
    else:
        correction = problem.adam(options.lr, options.steps, each_step=unit.check_stopped)
    return (base + start + correction).contiguous()


class Interference:
    """The objective around its start: x is what is added to Σ τ_i.

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

    def value(self, x: Tensor) -> float:
        """The objective at Σ τ_i + x."""
        return float(torch.linalg.vector_norm(x @ self.S.T + self.K) ** 2)

    def gradient(self, x: Tensor) -> Tensor:
        return torch.mm(x @ self.S.T + self.K, self.S).mul_(2)

    def exact(self) -> Tensor:
        """The minimiser of least norm: x = -K (S Sᵀ)⁺ S = -G (SᵀS)⁺, in float64."""
        S, K = self.S.double(), self.K.double()
        rows, columns = S.shape
        if rows <= columns:
            return -(K @ _pseudo_inverse(S @ S.T) @ S).to(self.S.dtype)
        return -(K @ S @ _pseudo_inverse(S.T @ S)).to(self.S.dtype)

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


def _pseudo_inverse(matrix: Tensor) -> Tensor:
    """Of a symmetric positive semidefinite matrix; directions of no curvature are left alone."""
    values, vectors = torch.linalg.eigh(matrix)
    # The matrix was made of numbers with float32's precision at best; its eigenvalues are known
    # to float64's.
    tolerance = values[-1] * matrix.shape[0] * torch.finfo(values.dtype).eps
    inverse = torch.where(values > tolerance, 1 / values, 0.0)
    return torch.mm(vectors * inverse, vectors.T)
