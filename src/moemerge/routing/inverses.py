"""Approximate inverses of the router's curvature, as operators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.routing.cg import Diagonal, LinearOperator
from moemerge.routing.curvature import RouterCurvature

# The first jitter to try if a Cholesky factorisation fails, relative to the mean diagonal.
FIRST_JITTER = 1e-7
JITTER_GROWTH = 10.0


class BlockInverse(LinearOperator):
    """One (d, d) matrix for each expert."""

    def __init__(self, inverses: Tensor) -> None:
        super().__init__((inverses.shape[0], inverses.shape[1]), inverses.device)
        self.inverses = inverses  # (K, d, d)

    def mv(self, vector: Tensor) -> Tensor:
        columns = vector.to(self.inverses.dtype).unsqueeze(-1)  # (K, d, 1)
        return torch.bmm(self.inverses, columns).squeeze(-1).double()


class KroneckerInverse(LinearOperator):
    """D (Q_H ⊗ Q_X) diag(values) (Q_H ⊗ Q_X)ᵀ D with an elementwise scale D."""

    def __init__(self, scale: Tensor, experts: Tensor, features: Tensor, values: Tensor) -> None:
        super().__init__((scale.shape[0], scale.shape[1]), scale.device)
        self.scale = scale  # (K, d)
        self.experts = experts  # (K, K), eigenvectors in columns
        self.features = features  # (d, d), eigenvectors in columns
        self.values = values  # (K, d)

    def mv(self, vector: Tensor) -> Tensor:
        y = self.experts.T @ (self.scale * vector).to(self.features.dtype) @ self.features
        y = self.experts @ (y * self.values) @ self.features.T
        return self.scale * y


@dataclass(frozen=True)
class KroneckerFactors:
    """Eigenvalues and eigenvectors of C_H and C_X: mean H and mean x xᵀ at unit diagonal."""

    values_h: Tensor  # (K,)
    vectors_h: Tensor  # (K, K)
    values_x: Tensor  # (d,), ascending
    vectors_x: Tensor  # (d, d)

    @classmethod
    def of(cls, operator: RouterCurvature) -> KroneckerFactors:
        mean_h = torch.stack([s.mean_hessian() for s in operator.curvatures]).sum(dim=0)
        # Tokens are weighted by tr H: confidently routed tokens have no curvature.
        gram = operator.curvatures[0].gram(_trace)
        for domain in operator.curvatures[1:]:
            gram += domain.gram(_trace)
        values_h, vectors_h = torch.linalg.eigh(_unit_diagonal(mean_h))
        values_x, vectors_x = torch.linalg.eigh(_unit_diagonal(gram))
        return cls(values_h.to(gram.dtype), vectors_h.to(gram.dtype), values_x, vectors_x)

    def inverse(self, operator: RouterCurvature, damping: float) -> KroneckerInverse:
        """S^-½ (a C_H ⊗ C_X + damping I)⁻¹ S^-½."""
        # Rounding makes zero eigenvalues a little negative.
        products = torch.outer(self.values_h, self.values_x).clamp_min(0.0)
        values = operator.dense * products + damping
        scale = Diagonal(operator.sum_diagonal).inverse().values.sqrt()
        return KroneckerInverse(scale, self.vectors_h, self.vectors_x, 1.0 / values)


def block_inverse(operator: RouterCurvature) -> tuple[BlockInverse, float]:
    """Return (a mean h_k x xᵀ + c diag)⁻¹ for each expert k, h = diag H, and the jitter used."""
    experts, width = operator.shape
    blocks = torch.zeros(experts, width, width, dtype=operator.dtype, device=operator.device)
    for expert in range(experts):
        for domain in operator.curvatures:
            blocks[expert] += domain.gram(lambda h, k=expert: h[:, k])  # type: ignore[misc]
    blocks.mul_(operator.dense).diagonal(dim1=1, dim2=2).add_(operator.damped.to(blocks.dtype))
    factors, jitter = cholesky(blocks)
    return BlockInverse(torch.cholesky_inverse(factors)), jitter


def cholesky(matrices: Tensor) -> tuple[Tensor, float]:
    """Return batched Cholesky factors, and the relative jitter that was needed (0 if none).

    A matrix that is zero altogether, or too small to be factored (an expert no token ever leans
    to), becomes the identity: it then changes nothing, as its residual is as small.
    """
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    limits = torch.finfo(matrices.dtype)
    vanishing = diagonal.mean(dim=-1) <= limits.tiny / limits.eps
    matrices[vanishing] = torch.eye(
        matrices.shape[-1], dtype=matrices.dtype, device=matrices.device
    )
    mean = diagonal.mean(dim=-1, keepdim=True)
    diagonal += torch.where(diagonal > 0, 0.0, mean)
    jitter, step = 0.0, FIRST_JITTER
    factors, info = torch.linalg.cholesky_ex(matrices)
    while bool((info != 0).any()) and step < 1.0:
        diagonal += (step - jitter) * mean
        jitter, step = step, step * JITTER_GROWTH
        factors, info = torch.linalg.cholesky_ex(matrices)
    return factors, jitter


def _trace(h: Tensor) -> Tensor:
    return h.sum(dim=-1)


def _unit_diagonal(matrix: Tensor) -> Tensor:
    """Return the matrix scaled to unit diagonal; empty rows become those of the identity."""
    diagonal = matrix.diagonal()
    empty = diagonal <= 0
    scale = torch.where(empty, torch.ones_like(diagonal), diagonal).rsqrt()
    unit = scale.unsqueeze(1) * matrix * scale
    unit.diagonal().add_(empty.to(matrix.dtype))
    return unit
