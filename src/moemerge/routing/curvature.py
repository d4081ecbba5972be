"""The curvature of the routing divergence as a matrix-free operator (the paper's Proposition 1).

For domain i with features x and target logits z_i (its own router on x, or whatever it was given),
the divergence is ½ (Wx − z_i)ᵀ H_i (Wx − z_i) to second order, averaged over the domain's tokens:

    Σ_i = mean H_i ⊗ x xᵀ,      H = D_g (diag p − p pᵀ) D_g      (softmax: g = 1)
    A   = Σ_i [a Σ_i + c diag Σ_i],   (a, c) = (α, 1 − α) or (1, γ)
    b   = Σ_i [a mean H_i z_i xᵀ + c diag Σ_i ⊙ w_i]

Where z_i = W_i x, b is the paper's Σ_i Σ_reg,i w_i. Where the target is the source model's own
routing there is no w with w x = z_i, so the diagonal part pulls towards the source's router w_i.

Probabilities, diag Σ and b do not depend on w. One pass over the features computes them, after
which every application costs two products with the features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from moemerge.architectures.gates import Gate
from moemerge.errors import DataError, NumericalError
from moemerge.linalg.operator import LinearOperator
from moemerge.routing.gates import (
    capped,
    divergence,
    divergence_gradient,
    is_bernoulli,
    probabilities,
    slope,
)

# Rows handled at once. On a CPU the (rows, experts) temporaries stay in a core's cache; a GPU
# wants long products and has the memory for them.
CPU_ROWS = 2048
GPU_ROWS = 65536


class Curvature(StrEnum):
    """How much of H is kept."""

    FULL = "full"
    DIAGONAL = "diagonal"
    IDENTITY = "identity"


@dataclass(frozen=True)
class Domain:
    """One source's tokens at one layer: the merged model's features and what to aim for."""

    name: str
    features: Sequence[Tensor]  # blocks of (tokens, d), any floating dtype, one device
    router: Tensor  # (K, d), or (K, d + 1) with the router's bias as last column
    targets: Sequence[Tensor] | None = (
        None  # blocks of (tokens, K) logits; None: router on features
    )

    @property
    def tokens(self) -> int:
        return sum(block.shape[0] for block in self.features)

    @property
    def has_bias(self) -> bool:
        return self.router.shape[1] == self.features[0].shape[1] + 1

    def check(self) -> None:
        """Refuse what cannot be meant."""
        if self.tokens == 0:
            raise DataError(
                f"domain {self.name!r} has no token",
                hint="give it calibration text, or leave the domain out",
            )
        experts, columns = self.router.shape
        for index, block in enumerate(self.features):
            if columns - block.shape[1] not in (0, 1):
                raise DataError(
                    f"domain {self.name!r}: features of width {block.shape[1]} for a router "
                    f"with {columns} columns"
                )
            if self.targets is None:
                continue
            if len(self.targets) != len(self.features) or self.targets[index].shape != (
                block.shape[0],
                experts,
            ):
                raise DataError(
                    f"domain {self.name!r}: target logits must be one ({block.shape[0]}, "
                    f"{experts}) block for each block of features"
                )


def rows_at_once(device: torch.device) -> int:
    """How many tokens a chunk holds."""
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS


def logits_of(x: Tensor, router: Tensor) -> Tensor:
    """W x (+ b where the router has one more column than x), (tokens, experts), in x's dtype."""
    width = x.shape[1]
    z = x @ router[:, :width].T.to(x.dtype)
    return z if router.shape[1] == width else z + router[:, width].to(x.dtype)


def chunks_of(domain: Domain) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The domain's features (and target logits) in chunks."""
    for index, block in enumerate(domain.features):
        rows = rows_at_once(block.device)
        for begin in range(0, block.shape[0], rows):
            chunk = slice(begin, begin + rows)
            yield block[chunk], None if domain.targets is None else domain.targets[index][chunk]


@dataclass(frozen=True)
class TokenWeights:
    """H of each token as H v = diagonal ⊙ v − rank_one (rank_one · v). None: identity, nothing."""

    diagonal: Tensor | None  # (tokens, experts)
    rank_one: Tensor | None  # (tokens, experts)

    def apply(self, v: Tensor) -> Tensor:
        """H v, (tokens, experts)."""
        if self.diagonal is None:
            return v
        u = self.diagonal.to(v.dtype) * v
        if self.rank_one is not None:
            a = self.rank_one.to(v.dtype)
            u.addcmul_(a, (a * v).sum(dim=-1, keepdim=True), value=-1.0)
        return u

    def own(self, like: Tensor) -> Tensor:
        """diag H, (tokens, experts); never negative."""
        if self.diagonal is None:
            return torch.ones_like(like)
        h = self.diagonal.to(like.dtype)
        if self.rank_one is not None:
            h = (h - self.rank_one.to(like.dtype) ** 2).clamp_min_(0.0)
        return h


def token_weights(
    gate: Gate, logits: Tensor, curvature: Curvature, dtype: torch.dtype
) -> TokenWeights:
    """H at `logits` (float64 for full accuracy), stored in `dtype`."""
    if curvature is Curvature.IDENTITY:
        return TokenWeights(None, None)
    p = probabilities(gate, logits)
    if is_bernoulli(gate):
        h = p * torch.sigmoid(-capped(gate, logits))
        if gate.soft_cap is not None:
            h = h * (1.0 - torch.tanh(logits / gate.soft_cap) ** 2) ** 2
        return TokenWeights(h.to(dtype), None)
    g = slope(gate, logits)
    a = p if g is None else p * g
    b = p if g is None else a * g
    if curvature is Curvature.DIAGONAL:
        return TokenWeights((b - a * a).to(dtype), None)
    if g is None:
        stored = _keep_positive(a.to(dtype), None)
        return TokenWeights(stored, stored)
    diagonal = b.to(dtype)
    return TokenWeights(diagonal, _keep_positive(a.to(dtype), diagonal))


def _keep_positive(a: Tensor, b: Tensor | None) -> Tensor:
    """Shrink a by an ulp where rounding would make diag(b) − a aᵀ indefinite (b None: b = a).

    That matrix is positive semidefinite exactly when Σ a²/b <= 1 (for a softmax, Σ p <= 1).
    Rounding the shrunk value adds at most half the ulp taken away.
    """
    wide = a.double()
    if b is None:
        excess = wide.sum(dim=-1, keepdim=True)
        shrunk = wide / excess
    else:
        ratio = wide * wide / b.double()
        ratio = torch.where(b > 0, ratio, torch.zeros_like(ratio))
        excess = ratio.sum(dim=-1, keepdim=True)
        shrunk = wide * excess.rsqrt()
    shrunk = shrunk * (1.0 - torch.finfo(a.dtype).eps)
    return torch.where(excess > 1.0, shrunk.to(a.dtype), a)


class DomainStatistics:
    """Everything about one domain that does not change while its router is solved for.

    The one pass over the features runs in float64 for the logits, H and the right-hand side, and
    in the working dtype for diag Σ, whose terms are all positive.

    `pull` is mean H z_i xᵀ with H at the target. With a router `at`, the statistics are those of
    a Newton step from there: H at `at`, and `pull` the negative gradient of the mean divergence.
    `kl` is the mean divergence at `at` (0 without).
    """

    def __init__(
        self,
        gate: Gate,
        domain: Domain,
        curvature: Curvature = Curvature.FULL,
        *,
        at: Tensor | None = None,
    ) -> None:
        domain.check()
        self.domain = domain
        self.tokens = domain.tokens
        self.router = domain.router.to(domain.features[0].device, torch.float64)  # (K, d)
        self.working = working_dtype(domain.features[0])
        self.weights: list[TokenWeights] = []
        self.pull = torch.zeros_like(self.router)  # mean H z_i xᵀ
        self.diagonal = torch.zeros_like(self.router)  # diag Σ_i
        kl = torch.zeros((), dtype=torch.float64, device=self.router.device)
        for x, target in chunks_of(domain):
            wide = x.double()
            z = logits_of(wide, self.router) if target is None else target.double()
            here = z if at is None else logits_of(wide, at)
            weights = token_weights(gate, here, curvature, self.working)
            self.weights.append(weights)
            if at is None:
                pull = weights.apply(z)
            else:
                pull = -divergence_gradient(gate, z, here)
                kl += divergence(gate, z, here).sum()
            _add_outer(self.pull, pull, wide)
            narrow = x.to(self.working)
            _add_outer(self.diagonal, weights.own(z).to(self.working), narrow * narrow)
        self.pull /= self.tokens
        self.diagonal /= self.tokens
        self.kl = float(kl) / self.tokens
        if not bool(torch.isfinite(self.pull).all() & torch.isfinite(self.diagonal).all()):
            raise NumericalError(
                f"domain {domain.name!r}: NaN or infinity in the router's inputs or logits",
                hint="run the model in float32 or bfloat16, or check the merged weights",
            )

    def chunks(self) -> Iterator[tuple[Tensor, TokenWeights]]:
        """Feature chunks with their H."""
        for (x, _target), weights in zip(chunks_of(self.domain), self.weights, strict=True):
            yield x, weights

    def product(self, vector: Tensor, dtype: torch.dtype) -> Tensor:
        """Σ_i v, computed in `dtype` within a chunk and float64 across chunks; (K, d) float64."""
        router = vector.to(dtype)
        total = torch.zeros_like(self.router)
        for x, weights in self.chunks():
            narrow = x.to(dtype)
            _add_outer(total, weights.apply(logits_of(narrow, router)), narrow)
        return total.div_(self.tokens)

    def mean_hessian(self) -> Tensor:
        """mean H_i over the tokens, (K, K) float64."""
        experts = self.router.shape[0]
        total = self.router.new_zeros(experts, experts)
        for x, weights in self.chunks():
            ones = torch.ones(x.shape[0], experts, dtype=self.working, device=x.device)
            diagonal = ones if weights.diagonal is None else weights.diagonal
            total += torch.diag(diagonal.sum(dim=0, dtype=torch.float64))
            if weights.rank_one is not None:
                total -= (weights.rank_one.T @ weights.rank_one).double()
        return total / self.tokens

    def gram(self, weight: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """mean t x xᵀ, (d, d) in the working dtype; t = weight(diag H) of a token, default 1."""
        columns = self.router.shape[1]
        total = torch.zeros(columns, columns, dtype=self.working, device=self.router.device)
        for x, weights in self.chunks():
            narrow = augmented(x.to(self.working), columns)
            if weight is not None:
                like = narrow.new_empty(x.shape[0], self.router.shape[0])
                narrow = narrow * weight(weights.own(like)).sqrt().unsqueeze(-1)
            total.addmm_(narrow.T, narrow)
        return total / self.tokens


def working_dtype(features: Tensor) -> torch.dtype:
    """float32, or float64 where the features are."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def augmented(x: Tensor, columns: int) -> Tensor:
    """x with a column of ones where the router carries a bias."""
    if x.shape[1] == columns:
        return x
    return torch.cat([x, x.new_ones(x.shape[0], 1)], dim=1)


def _add_outer(total: Tensor, u: Tensor, x: Tensor) -> None:
    """total += uᵀ [x 1], without building [x 1]; total is float64, (K, d or d + 1)."""
    width = x.shape[1]
    total[:, :width] += u.T @ x
    if total.shape[1] > width:
        total[:, width] += u.sum(dim=0)


class RouterCurvature(LinearOperator):
    """A = Σ_i (a Σ_i + c diag Σ_i), computed in `dtype`."""

    def __init__(
        self,
        statistics: Sequence[DomainStatistics],
        *,
        dense: float,
        diagonal: float,
        dtype: torch.dtype | None = None,
    ) -> None:
        first = statistics[0].router
        super().__init__((first.shape[0], first.shape[1]), first.device)
        self.statistics = tuple(statistics)
        self.dense = dense
        self.damping = diagonal
        self.dtype = dtype or statistics[0].working
        self.sum_diagonal = torch.stack([s.diagonal for s in statistics]).sum(dim=0)  # Σ diag Σ_i

    def accurate(self) -> RouterCurvature:
        """The same operator in float64."""
        return RouterCurvature(
            self.statistics, dense=self.dense, diagonal=self.damping, dtype=torch.float64
        )

    def mv(self, vector: Tensor) -> Tensor:
        out = self.damping * self.sum_diagonal * vector
        if self.dense == 0.0:
            return out
        for domain in self.statistics:
            out.add_(domain.product(vector, self.dtype), alpha=self.dense)
        return out

    def diagonal(self) -> Tensor:
        return (self.dense + self.damping) * self.sum_diagonal

    def rhs(self) -> Tensor:
        """b, (K, d) float64."""
        parts = [
            self.dense * s.pull + self.damping * s.diagonal * s.router for s in self.statistics
        ]
        return torch.stack(parts).sum(dim=0)
