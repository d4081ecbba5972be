"""Deflation: solve exactly along the leading directions of the features, for all experts.

Scaled to unit diagonal, A = a Σ + c diag Σ has no eigenvalue below c / (a + c), so only large
eigenvalues slow CG down. They belong to few directions of the features: a mean, outlier channels,
differences between domains and documents, the head of a steep spectrum. With Q (d, J) the J leading
directions, routers Z c = c Qᵀ, c (K, J), form a subspace in which A is a matrix of K·J rows,

    A_Z = Σ_i [a mean H ⊗ x̂ x̂ᵀ] + c Qᵀ diag(Σ) Q,      x̂ = Qᵀ x  (tokens, J),

computed from the projected tokens in one pass and factored once. Jacobi or Kronecker preconditions
the rest, for which they suffice. If H is diagonal, A_Z is block diagonal with blocks of J rows.

The correction s = y + Z A_Z⁻¹ Zᵀ (r − A y) needs no additional product. The logits of y are the
first half of a product, and give Zᵀ A y through x̂. The correction shifts these logits, again
through x̂, and the second half of the product, a sum over tokens, gives A s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.kernels.fused import Shift
from moemerge.kernels.splitting import split
from moemerge.routing.cg import LinearOperator
from moemerge.routing.curvature import DomainCurvature, RouterCurvature
from moemerge.routing.gates import TokenWeights
from moemerge.routing.inverses import KroneckerFactors, cholesky
from moemerge.routing.products import Precision, features_of

# Added to A_Z's unit diagonal, since A may be singular (for a softmax without damping it is).
LEAST_DAMPING = 1e-6
# Subspace iteration: additional vectors, rounds, and the size of the sample of tokens.
OVERSAMPLING, ROUNDS = 8, 4
SKETCH_TOKENS = 1 << 17
# Values of a (rows, K·J) chunk while A_Z is summed.
CHUNK = 1 << 26
# Bands in which a symmetric product is computed, each from its diagonal on.
BANDS = 4
# Experts whose Qᵀ diag(Σ) Q is computed at once.
EXPERTS_AT_ONCE = 64


class LeadingDirections:
    """The subspace Z c = c Qᵀ for all experts, and A_Z⁻¹ of one operator."""

    def __init__(self, operator: RouterCurvature, directions: Tensor) -> None:
        """`directions`: Qᵀ, (J, d)."""
        first = operator.curvatures[0]
        seen = first.representable(directions, Precision.COARSE)
        self.directions = seen.to(operator.dtype).double()  # as used in the projections
        self.projected = [_project(domain, self.directions) for domain in operator.curvatures]
        self.system = _factored(operator, self.directions, self.projected)

    @property
    def jitter(self) -> float:
        return self.system.jitter

    def refresh(self, operator: RouterCurvature) -> None:
        """Use another operator on the same features."""
        self.system = _factored(operator, self.directions, self.projected)

    def restrict(self, vector: Tensor) -> Tensor:
        return vector.double() @ self.directions.T  # (K, J)

    def prolong(self, coordinates: Tensor) -> Tensor:
        return coordinates @ self.directions

    def corrected(
        self, operator: LinearOperator, y: Tensor | None, r: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return s and A s for one product; float64 except for the product itself."""
        assert isinstance(operator, RouterCurvature)
        rest, logits = self.restrict(r), None
        if y is not None:
            logits, product = self._half_product(operator, y)
            rest = rest - product
        c = self.system.solve(rest)
        s = self.prolong(c) if y is None else y + self.prolong(c)
        return s, self._other_half(operator, s, logits, c)

    def _half_product(
        self, operator: RouterCurvature, y: Tensor
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Return the logits of y by domain and block, and Zᵀ A y, (K, J)."""
        product = self.restrict(operator.damping_of(y))
        logits = []
        for domain, projected in zip(operator.curvatures, self.projected, strict=True):
            parts = []
            for (x, weights), along in zip(domain.parts, projected, strict=True):
                features = features_of(x, operator.shape[1])
                parts.append(features.solver_logits(y, operator.precision))
                moment = features.moment(weights, parts[-1], along)
                product.add_(moment, alpha=operator.dense / domain.divisor)
            logits.append(parts)
        operator.ranks.all_reduce(product)
        return logits, product

    def _other_half(
        self,
        operator: RouterCurvature,
        s: Tensor,
        logits: list[list[Tensor]] | None,
        coefficients: Tensor,
    ) -> Tensor:
        """Return A s for s = y + Z c, from the logits of y (None: y = 0)."""
        out = operator.damping_of(s)
        experts = operator.shape[0]
        for number, (domain, projected) in enumerate(
            zip(operator.curvatures, self.projected, strict=True)
        ):
            for part, ((x, weights), along) in enumerate(zip(domain.parts, projected, strict=True)):
                z = along.new_zeros(len(along), experts) if logits is None else logits[number][part]
                features = features_of(x, operator.shape[1])
                shift = Shift(along, coefficients)
                features.add_weighted(out, weights, z, shift, operator.dense / domain.divisor)
        operator.ranks.all_reduce(out)
        return out


# --- finding directions -------------------------------------------------------------------------


def directions_of(factors: KroneckerFactors, operator: RouterCurvature, count: int) -> Tensor:
    """Return the leading eigenvectors of C_X for unscaled features: Qᵀ, (J, d) float64."""
    leading = factors.vectors_x[:, -count:].double()
    return (leading * _feature_scale(operator).unsqueeze(1)).T.contiguous()


def sketched_directions(operator: RouterCurvature, count: int) -> Tensor:
    """Approximate `directions_of` by subspace iteration on a sample of the tokens."""
    width = operator.shape[1]
    scale = _feature_scale(operator)
    wanted = min(width, count + OVERSAMPLING)
    rng = torch.Generator().manual_seed(0)  # on the CPU: the same for every device
    basis = torch.randn(wanted, width, generator=rng, dtype=torch.float64).to(operator.device)
    stride = -(-sum(domain.tokens for domain in operator.curvatures) // SKETCH_TOKENS)
    for _ in range(ROUNDS):
        basis = _orthonormal(_gram_product(operator, basis * scale, stride) * scale)
    # Rayleigh-Ritz: the leading directions within the subspace.
    image = _gram_product(operator, basis * scale, stride) * scale
    _, rotation = torch.linalg.eigh(image @ basis.T)
    leading: Tensor = rotation[:, -count:].T @ basis
    return leading * scale


def _feature_scale(operator: RouterCurvature) -> Tensor:
    """Return 1 / sqrt of the diagonal of Σ mean tr H x xᵀ, (d,); 0 for a constant-zero feature."""
    diagonal = operator.sum_diagonal.sum(dim=0)
    return torch.where(diagonal > 0, diagonal.rsqrt(), torch.zeros_like(diagonal))


def _orthonormal(rows: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(rows.T)[0]
    return q.T.contiguous()


def _gram_product(operator: RouterCurvature, rows: Tensor, stride: int) -> Tensor:
    """Return rows · Σ_i mean tr H x xᵀ over every `stride`th token, (J, d)."""
    out = torch.zeros_like(rows)
    for domain in operator.curvatures:
        own_taken = sum(-(-len(x) // stride) for x, _ in domain.parts)
        taken = operator.ranks.total(own_taken, out.device)
        for x, weights in domain.parts:
            features = features_of(x[::stride], operator.shape[1])
            along = features.working_logits(rows)
            own = weights.at(slice(None, None, stride)).own(
                along.new_empty(len(along), operator.shape[0])
            )
            along *= own.sum(dim=-1, keepdim=True)
            features.add_weighted(out, TokenWeights(None, None), along, None, 1.0 / taken)
    operator.ranks.all_reduce(out)
    return out


# --- A_Z ----------------------------------------------------------------------------------------


def _project(domain: DomainCurvature, directions: Tensor) -> list[Tensor]:
    """Return x̂ of every block, (tokens, J) in the working dtype."""
    columns = directions.shape[1]
    return [features_of(x, columns).working_logits(directions) for x, _ in domain.parts]


@dataclass(frozen=True)
class _System:
    """A_Z, scaled to unit diagonal and factored."""

    scale: Tensor  # (K, J)
    factor: Tensor  # (K·J, K·J), or (K, J, J) if experts are not coupled; or its inverse
    inverted: bool
    jitter: float

    def solve(self, coordinates: Tensor) -> Tensor:
        shape = coordinates.shape
        rhs = (self.scale * coordinates).reshape(*self.factor.shape[:-1], 1)
        solution = self.factor @ rhs if self.inverted else torch.cholesky_solve(rhs, self.factor)
        return self.scale * solution.reshape(shape)


def _factored(
    operator: RouterCurvature, directions: Tensor, projected: Sequence[Sequence[Tensor]]
) -> _System:
    own, cross = _sums(operator, projected)  # (K, J, J), and (K·J, K·J) or None
    experts, count = own.shape[:2]
    own = operator.dense * own + _damping(operator, directions)
    own = (own + own.mT) / 2
    diagonal = own.diagonal(dim1=1, dim2=2)  # (K, J)
    empty = diagonal <= 0
    scale = torch.where(empty, torch.ones_like(diagonal), diagonal).rsqrt()
    if cross is None:
        matrix = own
        matrix *= scale.unsqueeze(2) * scale.unsqueeze(1)
    else:
        matrix = cross.mul_(-operator.dense)
        for expert in range(experts):
            rows = slice(expert * count, (expert + 1) * count)
            matrix[rows, rows] = own[expert]
        matrix *= scale.reshape(-1, 1) * scale.reshape(-1)
    matrix.diagonal(dim1=-2, dim2=-1).add_(
        LEAST_DAMPING + empty.reshape(matrix.shape[:-1]).to(matrix.dtype)
    )
    factor, jitter = cholesky(matrix)
    # On a GPU a triangular solve takes longer than a product with the features.
    inverted = factor.is_cuda
    return _System(scale, torch.cholesky_inverse(factor) if inverted else factor, inverted, jitter)


def _damping(operator: RouterCurvature, directions: Tensor) -> Tensor:
    """Return Qᵀ diag(c Σ_kk) Q of every expert k, (K, J, J)."""
    parts = [
        (directions * rows.unsqueeze(1)) @ directions.T
        for rows in torch.split(operator.damped, EXPERTS_AT_ONCE)
    ]
    return torch.cat(parts)


def _sums(
    operator: RouterCurvature, projected: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, Tensor | None]:
    """Return Σ_i mean h_k x̂ x̂ᵀ per expert k, and Σ_i mean (v ⊗ x̂)(v ⊗ x̂)ᵀ of H = diag(·) − v vᵀ.

    Only the blocks between two different experts of the second are used. Its diagonal blocks would
    cancel against the diagonal of H for a confident router; the first contains them accurately.
    """
    experts, count = operator.shape[0], projected[0][0].shape[1]
    own = torch.zeros(experts, count, count, dtype=torch.float64, device=operator.device)
    cross: Tensor | None = None
    for domain, parts in zip(operator.curvatures, projected, strict=True):
        share = 1.0 / domain.divisor
        for weights, along in _chunks(domain, parts, experts):
            h = weights.own(along.new_empty(len(along), experts))
            blocks = (along.T @ _spread(h, along)).reshape(count, experts, count)
            own.add_(blocks.transpose(0, 1), alpha=share)
            if weights.rank_one is None:
                continue
            if cross is None:
                cross = own.new_zeros(experts * count, experts * count)
            both = _spread(weights.rank_one, along)
            _add_symmetric(cross, both, share, fused=domain.coarse_is_cheaper)
    operator.ranks.all_reduce(own, *([] if cross is None else [cross]))
    return own, None if cross is None else torch.triu(cross) + torch.triu(cross, 1).T


def _chunks(
    domain: DomainCurvature, projected: Sequence[Tensor], experts: int
) -> Iterator[tuple[TokenWeights, Tensor]]:
    """Yield H and x̂ in chunks of tokens."""
    rows = max(1, CHUNK // (experts * projected[0].shape[1]))
    for (_, weights), along in zip(domain.parts, projected, strict=True):
        for begin in range(0, len(along), rows):
            chunk = slice(begin, begin + rows)
            yield weights.at(chunk), along[chunk]


def _spread(values: Tensor, along: Tensor) -> Tensor:
    """Return v ⊗ x̂ of each token, (tokens, K·J)."""
    return (values.unsqueeze(2) * along.unsqueeze(1)).reshape(len(along), -1)


def _add_symmetric(out: Tensor, rows: Tensor, factor: float, *, fused: bool) -> None:
    """Add `factor` rowsᵀ rows to the upper triangle of `out`, and partly to the lower."""
    terms = list(split(rows, 2)) if fused else [rows]
    size = out.shape[0]
    for band in range(BANDS):
        begin, end = band * size // BANDS, (band + 1) * size // BANDS
        if fused:  # float32 products would take five times as long
            high, low = terms
            pairs = ((high, high), (high, low), (low, high))
            products = [
                torch.mm(one[:, begin:end].T, other[:, begin:], out_dtype=torch.float32)
                for one, other in pairs
            ]
            product = products[0] + (products[1] + products[2])
        else:
            product = rows[:, begin:end].T @ rows[:, begin:]
        out[begin:end, begin:].add_(product, alpha=factor)
