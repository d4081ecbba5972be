"""The two-level preconditioner: exact along the leading directions, Kronecker for the rest.

Scaled to unit diagonal, A = a Σ + c diag Σ has no eigenvalue below c / (a + c), so only large
eigenvalues slow CG down. They belong to few directions of the features: a mean, outlier channels,
differences between domains and documents, the head of a steep spectrum.

**Leading directions.** With Q (d, J) the leading J eigenvectors of the features' Gram matrix,
routers Z c = c Qᵀ, c (K, J), form a subspace in which A is a matrix of K·J rows,

    A_Z = Σ_i [a mean H ⊗ x̂ x̂ᵀ] + c Qᵀ diag(Σ) Q,      x̂ = Qᵀ x  (tokens, J),

computed from the projected tokens in one pass and factored once. For any y (a preconditioned
residual), s = y + Z A_Z⁻¹ Zᵀ (r − A y) leaves no residual in the subspace: Zᵀ(r − A s) = 0. CG with
directions made of such s, from a start with Zᵀr = 0, does not see the eigenvalues of Z.

The correction needs no additional product. The logits of y are the first half of a product, and
give Zᵀ A y through x̂. The correction shifts these logits, again through x̂, and the second half of
the product, a sum over tokens, gives A s.

**The rest.** Σ ≈ mean H ⊗ mean x xᵀ. With S = diag Σ known exactly and C_H, C_X the two factors
scaled to unit diagonal, A ≈ S^½ (a C_H ⊗ C_X + c I) S^½. The eigenvectors of the two small matrices
diagonalise the bracket including its damping.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moemerge.kernels.fused import Shift
from moemerge.routing.cg import LinearOperator, Preconditioner
from moemerge.routing.curvature import RouterCurvature
from moemerge.routing.products import features_of

# Limits on J, and on the rows of A_Z; a multiple of 8 suits the tensor cores.
MOST_DIRECTIONS, LEAST_DIRECTIONS, DIRECTION_STEP, MOST_ROWS = 64, 4, 8, 4096
# Computing A_Z may cost as much as this number of products with A.
BUILD_PRODUCTS = 10.0
# Added to A_Z's unit diagonal, since A may be singular (for a softmax without damping it is).
LEAST_DAMPING = 1e-6
# More jitter, relative to the unit diagonal, if a Cholesky factorisation fails.
FIRST_JITTER, JITTER_GROWTH = 1e-7, 10.0
# Values of a (rows, K·J) chunk while A_Z is summed.
CHUNK = 1 << 26
# Minimum damping of the rest at α = 0.9: with 0.1 the most ill-conditioned features take a third
# more steps, with 0.8 the best-conditioned do. It falls with the square root of A's own damping.
# Newton systems have hardly any, and a first layer's eigenvalues span seven orders of magnitude:
# 0.4 took ten times the steps of 0.004 there.
REST_DAMPING, LEAST_REST_DAMPING, REST_MEASURED_AT = 0.4, 0.003, 0.1 / 0.9


def direction_count(shape: tuple[int, int]) -> int:
    """Return J for a router of this shape.

    A_Z takes N (K·J)² / 2 multiply-adds, a product with A takes 2 N K d.
    """
    experts, width = shape
    affordable = math.isqrt(int(4 * BUILD_PRODUCTS * width / experts))
    count = min(MOST_DIRECTIONS, affordable, MOST_ROWS // experts)
    count -= count % DIRECTION_STEP
    return max(1, min(max(count, LEAST_DIRECTIONS), width // 2))


class TwoLevel(Preconditioner):
    kind = "two-level"

    def __init__(self, operator: RouterCurvature) -> None:
        mean_h = torch.stack([domain.mean_hessian() for domain in operator.curvatures]).sum(dim=0)
        # Tokens are weighted by tr H: confidently routed tokens have no curvature.
        gram = torch.stack([domain.gram() for domain in operator.curvatures]).sum(dim=0)
        values_h, vectors_h = torch.linalg.eigh(_unit_diagonal(mean_h))
        self.values_x, self.vectors_x = torch.linalg.eigh(_unit_diagonal(gram))  # ascending
        self.values_h, self.vectors_h = values_h.to(gram.dtype), vectors_h.to(gram.dtype)
        # The leading directions of the unscaled features.
        diagonal = operator.sum_diagonal.sum(dim=0)
        scale = torch.where(diagonal > 0, diagonal.rsqrt(), torch.zeros_like(diagonal))
        leading = self.vectors_x[:, -direction_count(operator.shape) :].double()
        directions = operator.representable((leading * scale.unsqueeze(1)).T.contiguous())
        self.directions = directions.to(gram.dtype).double()  # Qᵀ, (J, d), as used for x̂
        self.projected = [  # x̂ of every block of every domain, (tokens, J)
            [features_of(x, operator.shape[1]).working_logits(self.directions) for x, _ in d.parts]
            for d in operator.curvatures
        ]
        self.update(operator)

    def update(self, operator: RouterCurvature) -> None:
        """Use another operator on the same features."""
        self.inverse, self.scale, self.jitter = self._inverse_along_directions(operator)
        wanted = REST_DAMPING * min(
            1.0, (operator.damping / operator.dense / REST_MEASURED_AT) ** 0.5
        )
        damping = max(operator.damping, operator.dense * max(wanted, LEAST_REST_DAMPING))
        # Rounding makes zero eigenvalues a little negative.
        products = torch.outer(self.values_h, self.values_x).clamp_min(0.0)
        self.rest_values = 1.0 / (operator.dense * products + damping)
        diagonal = operator.sum_diagonal
        self.rest_scale = torch.where(diagonal > 0, diagonal, torch.ones_like(diagonal)).rsqrt()

    def rest(self, r: Tensor) -> Tensor:
        """Return S^-½ (a C_H ⊗ C_X + damping I)⁻¹ S^-½ r."""
        y = self.vectors_h.T @ (self.rest_scale * r).to(self.vectors_x.dtype) @ self.vectors_x
        y = self.vectors_h @ (y * self.rest_values) @ self.vectors_x.T
        preconditioned: Tensor = self.rest_scale * y
        return preconditioned

    def along_directions(self, r: Tensor) -> Tensor:
        """Return c = A_Z⁻¹ r of coordinates r, (K, J)."""
        rhs = (self.scale * r).reshape(-1, 1)
        return self.scale * (self.inverse @ rhs).reshape(r.shape)

    def first(self, operator: LinearOperator, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.corrected(operator, None, r)

    def direction(self, operator: LinearOperator, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.corrected(operator, operator.representable(self.rest(r)), r)

    def corrected(
        self, operator: LinearOperator, y: Tensor | None, r: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return s = y + Z A_Z⁻¹ Zᵀ (r − A y) and A s, for one product; y None is zero."""
        assert isinstance(operator, RouterCurvature)
        experts, columns = operator.shape
        blocks = [
            (features_of(x, columns), weights, along, operator.dense / domain.divisor)
            for domain, projected in zip(operator.curvatures, self.projected, strict=True)
            for (x, weights), along in zip(domain.parts, projected, strict=True)
        ]
        residual = r.double() @ self.directions.T  # Zᵀ r, (K, J)
        logits: list[Tensor] = []
        if y is not None:
            product = operator.damping_of(y) @ self.directions.T
            for features, weights, along, share in blocks:
                logits.append(features.solver_logits(y))
                product.add_(features.moment(weights, logits[-1], along), alpha=share)
            operator.ranks.all_reduce(product)
            residual = residual - product
        c = self.along_directions(residual)
        s = c @ self.directions if y is None else y + c @ self.directions
        out = operator.damping_of(s)
        for number, (features, weights, along, share) in enumerate(blocks):
            z = along.new_zeros(len(along), experts) if y is None else logits[number]
            features.add_weighted(out, weights, z, Shift(along, c), share)
        operator.ranks.all_reduce(out)
        return s, out

    def _inverse_along_directions(self, operator: RouterCurvature) -> tuple[Tensor, Tensor, float]:
        """Return A_Z⁻¹ at unit diagonal, that scale (K, J), and the jitter that was needed."""
        experts, count = operator.shape[0], len(self.directions)
        # Σ_i mean h_k x̂ x̂ᵀ per expert k, and Σ_i mean (v ⊗ x̂)(v ⊗ x̂)ᵀ of H = diag(h) − v vᵀ. Of
        # the second only the blocks between two different experts are used. Its diagonal blocks
        # would cancel against diag(h) for a confident router; the first has them accurately.
        own = torch.zeros(experts, count, count, dtype=torch.float64, device=operator.device)
        matrix = own.new_zeros(experts * count, experts * count)
        rows = max(1, CHUNK // (experts * count))
        for domain, projected in zip(operator.curvatures, self.projected, strict=True):
            for (x, weights), along_block in zip(domain.parts, projected, strict=True):
                for begin in range(0, len(along_block), rows):
                    part = slice(begin, begin + rows)
                    here, along = weights.at(part), along_block[part]
                    h = here.own(along.new_empty(len(along), experts))
                    blocks = (along.T @ _spread(h, along)).reshape(count, experts, count)
                    own.add_(blocks.transpose(0, 1), alpha=1.0 / domain.divisor)
                    if here.rank_one is not None:
                        both = _spread(here.rank_one, along)
                        product = features_of(x, operator.shape[1]).self_product(both)
                        matrix.add_(product, alpha=-operator.dense / domain.divisor)
        operator.ranks.all_reduce(own, matrix)
        for expert in range(experts):
            block = slice(expert * count, (expert + 1) * count)
            damping = (self.directions * operator.damped[expert]) @ self.directions.T
            matrix[block, block] = operator.dense * own[expert] + damping
        diagonal = matrix.diagonal()
        empty = diagonal <= 0
        scale = torch.where(empty, torch.ones_like(diagonal), diagonal).rsqrt()
        matrix = (matrix + matrix.T) * (0.5 * scale * scale.unsqueeze(1))
        matrix.diagonal().add_(LEAST_DAMPING + empty.to(matrix.dtype))
        jitter, step = 0.0, FIRST_JITTER
        factor, info = torch.linalg.cholesky_ex(matrix)
        while bool(info != 0) and step < 1.0:
            matrix.diagonal().add_(step - jitter)
            jitter, step = step, step * JITTER_GROWTH
            factor, info = torch.linalg.cholesky_ex(matrix)
        # The inverse, as a triangular solve on a GPU takes longer than a product with the features.
        return torch.cholesky_inverse(factor), scale.reshape(experts, count), jitter


def _spread(values: Tensor, along: Tensor) -> Tensor:
    """Return v ⊗ x̂ of each token, (tokens, K·J)."""
    return (values.unsqueeze(2) * along.unsqueeze(1)).reshape(len(along), -1)


def _unit_diagonal(matrix: Tensor) -> Tensor:
    """Return the matrix scaled to unit diagonal; empty rows become those of the identity."""
    diagonal = matrix.diagonal()
    empty = diagonal <= 0
    scale = torch.where(empty, torch.ones_like(diagonal), diagonal).rsqrt()
    unit = scale.unsqueeze(1) * matrix * scale
    unit.diagonal().add_(empty.to(matrix.dtype))
    return unit


# Matrices in memory: Gram matrix, eigenvectors and workspace; A_Z, its factor and its inverse.
KRONECKER_MATRICES, LEADING_MATRICES = 8, 5


def two_level_bytes(shape: tuple[int, int], tokens: int, itemsize: int) -> int:
    """Return the memory of building the preconditioner and solving with it, without vectors."""
    experts, width = shape
    rows = experts * direction_count(shape)
    # Logits of all tokens and their coordinates; a chunk of v ⊗ x̂ with its terms.
    tall = tokens * (experts + rows // experts) + 2 * min(CHUNK, tokens * rows)
    return itemsize * (tall + KRONECKER_MATRICES * width**2) + 8 * LEADING_MATRICES * rows**2
