"""The curvature of the routing divergence as a matrix-free operator (the paper's Proposition 1).

For domain i with features x and target logits z_i (its own router on x, or given logits), the
divergence is ½ (Wx − z_i)ᵀ H_i (Wx − z_i) to second order, averaged over the domain's tokens. If
the domain has a weight, this mean and every mean below are multiplied by it:

    Σ_i = mean H_i ⊗ x xᵀ,      H = D_g (diag p − p pᵀ) D_g      (softmax: g = 1)
    A   = Σ_i [a Σ_i + c diag Σ_i],   (a, c) = (α, 1 − α) or (1, γ)
    b   = Σ_i [a mean H_i z_i xᵀ + c diag Σ_i ⊙ w_i]

If z_i = W_i x, b is the paper's Σ_i Σ_reg,i w_i. If the target is the source model's own routing,
no w satisfies w x = z_i; the diagonal part then pulls towards the source's router w_i.

Probabilities, diag Σ and b do not depend on w, and one pass over the features computes them. Every
application then costs two products with the features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.families.rules import Gate
from moemerge.routing.cg import LinearOperator
from moemerge.routing.gates import (
    Curvature,
    TokenWeights,
    divergence,
    divergence_gradient,
    token_weights,
)
from moemerge.routing.products import (
    DomainFeatures,
    Features,
    chunks_of,
    coalesced,
    features_of,
    rows_at_once,
    working_dtype,
)

# Steps of a solver between two synchronisations with a GPU.
GPU_CHECK_EVERY = 4


class DomainCurvature:
    """The quantities of one domain that stay constant during a solve.

    One pass over the features computes H and the right-hand side in float64, from logits of at
    least float32's accuracy (float64 in plain torch). diag Σ, whose terms are all positive, is
    computed in the working dtype.

    `pull` is mean H z_i xᵀ with H at the target. With a router `at`, both belong to a Newton step
    from it: H at `at`, and `pull` the negative gradient of the mean divergence. `kl` is the mean
    divergence at `at`, or 0 without it.
    """

    def __init__(
        self,
        gate: Gate,
        domain: DomainFeatures,
        curvature: Curvature = Curvature.FULL,
        *,
        at: Tensor | None = None,
    ) -> None:
        domain.check()
        self.domain = domain
        self.ranks = domain.ranks
        self.tokens = self.ranks.total(domain.tokens, domain.features[0].device)
        self.divisor = self.tokens / domain.weight
        self.router = domain.router.to(domain.features[0].device, torch.float64)  # (K, d)
        self.working = working_dtype(domain.features[0])
        self.pull = torch.zeros_like(self.router)  # mean H z_i xᵀ
        self.diagonal = torch.zeros_like(self.router)  # diag Σ_i
        kl = torch.zeros((), dtype=torch.float64, device=self.router.device)
        parts: list[tuple[Tensor, TokenWeights]] = []
        for x, target in chunks_of(domain):
            features = self._features(x)
            z = features.logits(self.router) if target is None else target.double()
            here = z if at is None else features.logits(at)
            weights = token_weights(gate, here, curvature, self.working)
            parts.append((x, weights))
            if at is None:
                pull = weights.apply(z)
            else:
                pull = -divergence_gradient(gate, z, here)
                kl += divergence(gate, z, here).sum()
            self.pull += features.outer(pull)
            self.diagonal += features.squares(weights.own(z))
        self.parts = list(coalesced(parts))
        self.ranks.all_reduce(self.pull, self.diagonal, kl)
        self.pull /= self.divisor
        self.diagonal /= self.divisor
        self.kl = float(kl) / self.divisor
        if not bool(torch.isfinite(self.pull).all() & torch.isfinite(self.diagonal).all()):
            raise NumericalError(
                f"domain {domain.name!r}: NaN or infinity in the router's inputs or logits",
                hint="run the model in float32 or bfloat16, or check the merged weights",
            )

    def _features(self, x: Tensor) -> Features:
        return features_of(x, self.router.shape[1])

    def chunks(self) -> Iterator[tuple[Features, TokenWeights]]:
        """Yield features with their H, in chunks small enough for temporaries."""
        for x, weights in self.parts:
            rows = rows_at_once(x.device)
            for begin in range(0, x.shape[0], rows):
                chunk = slice(begin, begin + rows)
                yield self._features(x[chunk]), weights.at(chunk)

    def mean_hessian(self) -> Tensor:
        """Return mean H_i over the tokens, (K, K) float64."""
        experts = self.router.shape[0]
        total = self.router.new_zeros(experts, experts)
        for features, weights in self.chunks():
            if weights.diagonal is None:
                total.diagonal().add_(features.x.shape[0])
                continue
            total += torch.diag(weights.diagonal.sum(dim=0, dtype=torch.float64))
            if weights.rank_one is not None:
                total -= (weights.rank_one.T @ weights.rank_one).double()
        self.ranks.all_reduce(total)
        return total / self.divisor

    def gram(self) -> Tensor:
        """Return mean tr(H) x xᵀ, (d, d) in the working dtype."""
        experts, columns = self.router.shape
        total = torch.zeros(columns, columns, dtype=self.working, device=self.router.device)
        for features, weights in self.chunks():
            h = weights.own(total.new_empty(features.x.shape[0], experts))
            total += features.gram(h.sum(dim=-1))
        self.ranks.all_reduce(total)
        return total / self.divisor


class RouterCurvature(LinearOperator):
    """A = Σ_i (a Σ_i + c diag Σ_i).

    Unless `accurate`, vectors must be `representable`: on a GPU others are rounded. For damping,
    diag Σ is at least `floor` times its mean over the experts, so that experts without curvature
    are damped, too.
    """

    def __init__(
        self,
        curvatures: Sequence[DomainCurvature],
        *,
        dense: float,
        diagonal: float,
        floor: float = 0.0,
        accurate: bool = False,
    ) -> None:
        first = curvatures[0].router
        super().__init__((first.shape[0], first.shape[1]), first.device)
        self.curvatures = tuple(curvatures)
        self.ranks = curvatures[0].ranks
        self.dense = dense
        self.damping = diagonal
        self.dtype = curvatures[0].working
        self.floor = floor
        self.is_accurate = accurate
        total = torch.stack([s.diagonal for s in curvatures]).sum(dim=0)  # Σ diag Σ_i
        self.sum_diagonal = torch.maximum(total, floor * total.mean(dim=0)) if floor else total
        self.damped = diagonal * self.sum_diagonal  # c diag Σ, (K, d)

    @property
    def check_every(self) -> int:
        """Steps between two synchronisations, so that a GPU is not idle."""
        return 1 if self.device.type == "cpu" else GPU_CHECK_EVERY

    def accurate(self) -> RouterCurvature:
        """Return the same operator at the highest accuracy."""
        return RouterCurvature(
            self.curvatures,
            dense=self.dense,
            diagonal=self.damping,
            floor=self.floor,
            accurate=True,
        )

    def mv(self, vector: Tensor) -> Tensor:
        if self.dense == 0.0:
            return self.damped * vector
        vector = vector.contiguous()
        out = self.damping_of(vector)
        for domain in self.curvatures:
            for x, weights in domain.parts:
                factor = self.dense / domain.divisor
                features = features_of(x, self.shape[1])
                features.add_curvature(out, weights, vector, factor, accurate=self.is_accurate)
        self.ranks.all_reduce(out)
        return out

    def damping_of(self, vector: Tensor) -> Tensor:
        """Return c diag Σ v on the leading rank and 0 on others, since ranks are summed."""
        return self.damped * vector if self.ranks.leads else torch.zeros_like(self.damped)

    def representable(self, vector: Tensor) -> Tensor:
        return features_of(self.curvatures[0].parts[0][0], self.shape[1]).representable(vector)

    def diagonal(self) -> Tensor:
        return (self.dense + self.damping) * self.sum_diagonal

    def rhs(self) -> Tensor:
        """Return b, (K, d) float64."""
        parts = [
            self.dense * s.pull + self.damping * s.diagonal * s.router for s in self.curvatures
        ]
        return torch.stack(parts).sum(dim=0)
