"""Approximate inverses of the router's curvature, and which of them to take.

* Jacobi: the diagonal.
* Blocks: for each expert its exact (d, d) block of A. Costs K weighted Gram matrices and K·d²
  memory, so it is for small d.
* Kronecker: Σ ≈ mean H ⊗ mean x xᵀ. With S = diag Σ known exactly and C_H, C_X the two factors
  scaled to unit diagonal, A ≈ S^½ (a C_H ⊗ C_X + c I) S^½. The eigenvectors of the two small
  matrices diagonalise the bracket whole, damping included; blending each factor with its own
  diagonal instead would put the damping in the wrong place, and takes twice the steps.

Blocks see how each expert's own tokens are correlated, which one Gram matrix for all cannot. With
little damping and trained features it is what counts: a Newton system of a small model (K 24, d 96)
takes 3 steps with blocks, and a hundred without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from moemerge.linalg.operator import Diagonal, Identity, LinearOperator
from moemerge.routing.curvature import RouterCurvature

# Least damping of the Kronecker form, as a share of a. Its small eigenvalues are far from A's: with
# A's own damping of 1e-4 in place of this, CG takes four times the steps.
KRONECKER_DAMPING = 0.02
# Jitter tried first where a Cholesky factorisation fails, relative to the mean diagonal.
FIRST_JITTER = 1e-7
JITTER_GROWTH = 10.0
# Blocks may not take more memory than this.
BLOCK_BYTES = 2 << 30


class Preconditioner(StrEnum):
    """The ways to precondition; AUTO takes the one a cost model expects to be fastest."""

    AUTO = "auto"
    NONE = "none"
    JACOBI = "jacobi"
    BLOCK = "block"
    KRONECKER = "kronecker"


@dataclass(frozen=True)
class Prepared:
    """A preconditioner ready for use; `jitter` is what made it definite (0: nothing was needed)."""

    kind: Preconditioner
    operator: LinearOperator
    jitter: float = 0.0


class BlockInverse(LinearOperator):
    """One (d, d) matrix for each expert."""

    def __init__(self, inverses: Tensor) -> None:
        super().__init__((inverses.shape[0], inverses.shape[1]), inverses.device)
        self.inverses = inverses  # (K, d, d)

    def mv(self, vector: Tensor) -> Tensor:
        columns = vector.to(self.inverses.dtype).unsqueeze(-1)  # (K, d, 1)
        return torch.bmm(self.inverses, columns).squeeze(-1).double()

    def diagonal(self) -> Tensor:
        return self.inverses.diagonal(dim1=1, dim2=2).double()


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

    def diagonal(self) -> Tensor:
        spread = (self.experts**2) @ self.values @ (self.features**2).T
        return self.scale * self.scale * spread


Steps = Mapping[Preconditioner, int]
# Steps to a residual of 1e-6 at α = 0.9, measured: on small models with real features (K 16-32,
# d 64-128) and on d = 2048, K = 64 synthetic ones. Only their ratios matter.
SOLVE_STEPS: Steps = {
    Preconditioner.JACOBI: 200,
    Preconditioner.KRONECKER: 40,
    Preconditioner.BLOCK: 55,
}
# Steps of all Newton systems of a router together (`exact`), the preconditioner built once;
# measured on trained features (K 24, d 96), where the slowest of five layers weighs most.
NEWTON_STEPS: Steps = {
    Preconditioner.JACOBI: 500,
    Preconditioner.KRONECKER: 140,
    Preconditioner.BLOCK: 12,
}


def prepare(
    operator: RouterCurvature, kind: Preconditioner, steps: Steps = SOLVE_STEPS
) -> Prepared:
    """Build the preconditioner asked for; AUTO chooses for as many `steps` as each would take."""
    if kind is Preconditioner.AUTO:
        kind = choose(operator.shape, tokens_of(operator), operator.dtype, steps)
    if kind is Preconditioner.JACOBI:
        return Prepared(kind, Diagonal(operator.diagonal()).inverse())
    if kind is Preconditioner.BLOCK:
        return _block(operator)
    if kind is Preconditioner.KRONECKER:
        return _kronecker(operator)
    return Prepared(Preconditioner.NONE, Identity(operator.shape, operator.device))


# Tokens for each feature below which one Gram matrix misleads: with two, Kronecker took up to 1000
# steps and more where Jacobi took 411 at the most.
LEAST_TOKENS = 4
# An eigendecomposition's time in n³ multiply-adds of a product: 6 (n = 2048) to 13 (n = 256).
EIGEN_COST = 10.0
# Cholesky and inverse: 1.3 to 4.
INVERSE_COST = 4.0
# Work (multiply-adds) below which calls, not arithmetic, cost the time.
NEGLIGIBLE_WORK = 2e8


@dataclass(frozen=True)
class Work:
    """Multiply-adds of a preconditioner: to build it, and of one CG step with it."""

    build: float
    step: float


def works(shape: tuple[int, int], tokens: int) -> dict[Preconditioner, Work]:
    """The work of every kind that AUTO knows."""
    experts, width = shape
    product = 2.0 * tokens * experts * width
    eigen = EIGEN_COST * (width**3 + experts**3)
    blocks = experts * (tokens * width**2 + INVERSE_COST * width**3)
    return {
        Preconditioner.JACOBI: Work(0.0, product),
        Preconditioner.KRONECKER: Work(
            tokens * width**2 + eigen, product + 2.0 * experts * width * (width + experts)
        ),
        Preconditioner.BLOCK: Work(blocks, product + 1.0 * experts * width**2),
    }


def costs(
    shape: tuple[int, int], tokens: int, dtype: torch.dtype, steps: Steps = SOLVE_STEPS
) -> dict[Preconditioner, float]:
    """Expected work of a whole solve in multiply-adds, build included; what memory allows."""
    experts, width = shape
    known = works(shape, tokens)
    if experts * width**2 * dtype.itemsize > BLOCK_BYTES:
        del known[Preconditioner.BLOCK]
    if tokens < LEAST_TOKENS * width:
        del known[Preconditioner.KRONECKER]
    return {kind: work.build + steps[kind] * work.step for kind, work in known.items()}


def choose(
    shape: tuple[int, int], tokens: int, dtype: torch.dtype, steps: Steps = SOLVE_STEPS
) -> Preconditioner:
    """The kind with the least expected work; the sturdiest where all are negligible."""
    expected = costs(shape, tokens, dtype, steps)
    if expected.get(Preconditioner.BLOCK, float("inf")) < NEGLIGIBLE_WORK:
        return Preconditioner.BLOCK
    return min(expected, key=lambda kind: expected[kind])


def tokens_of(operator: RouterCurvature) -> int:
    return sum(domain.tokens for domain in operator.statistics)


def steps_to_build(operator: RouterCurvature, kind: Preconditioner) -> float:
    """How many CG steps cost as much as building a preconditioner (not AUTO) for the operator."""
    work = works(operator.shape, tokens_of(operator)).get(kind)
    return 0.0 if work is None else work.build / work.step


# Gram matrix, eigenvectors and an eigendecomposition's workspace; a block, its factor, its inverse
# and what torch needs to make the last.
KRONECKER_MATRICES, BLOCK_MATRICES = 8, 4


def matrix_bytes(
    kind: Preconditioner, shape: tuple[int, int], tokens: int, dtype: torch.dtype
) -> int:
    """The most memory that building a preconditioner takes, vectors left out.

    For AUTO, whichever of its two choices (for one system, for Newton's) takes more.
    """
    experts, width = shape
    kinds = {kind}
    if kind is Preconditioner.AUTO:
        kinds = {choose(shape, tokens, dtype, steps) for steps in (SOLVE_STEPS, NEWTON_STEPS)}
    count = {
        Preconditioner.KRONECKER: KRONECKER_MATRICES,
        Preconditioner.BLOCK: BLOCK_MATRICES * experts,
    }
    return max(count.get(one, 0) for one in kinds) * width**2 * dtype.itemsize


def _block(operator: RouterCurvature) -> Prepared:
    """(a mean h_k x xᵀ + c diag)⁻¹ for each expert k, h = diag H."""
    experts, width = operator.shape
    blocks = torch.zeros(experts, width, width, dtype=operator.dtype, device=operator.device)
    for expert in range(experts):
        for domain in operator.statistics:
            blocks[expert] += domain.gram(lambda h, k=expert: h[:, k])  # type: ignore[misc]
    damped = operator.damping * operator.sum_diagonal
    blocks.mul_(operator.dense).diagonal(dim1=1, dim2=2).add_(damped.to(blocks.dtype))
    factors, jitter = cholesky(blocks)
    return Prepared(Preconditioner.BLOCK, BlockInverse(torch.cholesky_inverse(factors)), jitter)


def cholesky(matrices: Tensor) -> tuple[Tensor, float]:
    """Batched Cholesky factors, with the relative jitter that was needed (0 where none was).

    A matrix that is zero altogether (an expert no token ever leans to) becomes the identity: it
    then changes nothing, as its residual is zero too.
    """
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(dim=-1, keepdim=True)
    diagonal += torch.where(diagonal > 0, 0.0, torch.where(mean > 0, mean, torch.ones_like(mean)))
    jitter, step = 0.0, FIRST_JITTER
    factors, info = torch.linalg.cholesky_ex(matrices)
    while bool((info != 0).any()) and step < 1.0:
        diagonal += (step - jitter) * mean
        jitter, step = step, step * JITTER_GROWTH
        factors, info = torch.linalg.cholesky_ex(matrices)
    return factors, jitter


def _kronecker(operator: RouterCurvature) -> Prepared:
    mean_h = torch.stack([s.mean_hessian() for s in operator.statistics]).sum(dim=0)
    # Tokens weighted by tr H: those that are routed with certainty do not bend the divergence.
    gram = operator.statistics[0].gram(_trace)
    for domain in operator.statistics[1:]:
        gram += domain.gram(_trace)
    lambda_h, vectors_h = torch.linalg.eigh(_unit_diagonal(mean_h))
    lambda_x, vectors_x = torch.linalg.eigh(_unit_diagonal(gram))
    damping = max(operator.damping, KRONECKER_DAMPING * operator.dense)
    # Rounding makes zero eigenvalues a little negative.
    products = torch.outer(lambda_h.to(lambda_x.dtype), lambda_x).clamp_min(0.0)
    values = operator.dense * products + damping
    scale = Diagonal(operator.sum_diagonal).inverse().values.sqrt()
    inverse = KroneckerInverse(scale, vectors_h.to(lambda_x.dtype), vectors_x, 1.0 / values)
    return Prepared(Preconditioner.KRONECKER, inverse)


def _trace(h: Tensor) -> Tensor:
    return h.sum(dim=-1)


def _unit_diagonal(matrix: Tensor) -> Tensor:
    """The matrix scaled to a diagonal of ones; empty rows become those of the identity."""
    diagonal = matrix.diagonal()
    empty = diagonal <= 0
    scale = torch.where(empty, torch.ones_like(diagonal), diagonal).rsqrt()
    unit = scale.unsqueeze(1) * matrix * scale
    unit.diagonal().add_(empty.to(matrix.dtype))
    return unit
