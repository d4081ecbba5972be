"""Products with the features of one source's tokens at one layer.

Plain torch computes with any features on any device: in float64, or in float32 inside the solver.
For bf16 features on a Hopper GPU, fused kernels compute exact products of bf16 terms without
copying the features. They sum in float32 within a few thousand tokens, and in float64 beyond.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from moemerge.errors import DataError
from moemerge.kernels import fused
from moemerge.kernels.fused import Shift
from moemerge.kernels.splitting import ACCURATE, FAST, representable, split
from moemerge.routing.gates import TokenWeights
from moemerge.runtime.ranks import SINGLE, Ranks

# Rows per chunk. On a CPU the (rows, experts) temporaries stay in a core's cache. A GPU needs long
# products and has the memory for them.
CPU_ROWS = 2048
GPU_ROWS = 65536


@dataclass(frozen=True)
class DomainFeatures:
    """One source's tokens at one layer: the merged model's features and the target routing."""

    name: str
    features: Sequence[Tensor]  # blocks of (tokens, d), any floating dtype, one device
    router: Tensor  # (K, d), or (K, d + 1) with the router's bias as last column
    targets: Sequence[Tensor] | None = (
        None  # blocks of (tokens, K) logits; None: router on features
    )
    weight: float = 1.0  # relative to other domains
    ranks: Ranks = SINGLE  # the processes that share the domain's tokens

    @property
    def tokens(self) -> int:
        return sum(block.shape[0] for block in self.features)

    @property
    def divisor(self) -> float:
        """The divisor that turns a sum over tokens into the domain's weighted mean."""
        return self.ranks.total(self.tokens, self.features[0].device) / self.weight

    @property
    def has_bias(self) -> bool:
        return self.router.shape[1] == self.features[0].shape[1] + 1

    def check(self) -> None:
        """Raise DataError for inconsistent shapes or missing tokens."""
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
    """Return the tokens per chunk."""
    return CPU_ROWS if device.type == "cpu" else GPU_ROWS


def chunks_of(domain: DomainFeatures) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the domain's features and target logits in chunks."""
    for index, block in enumerate(domain.features):
        rows = rows_at_once(block.device)
        for begin in range(0, block.shape[0], rows):
            chunk = slice(begin, begin + rows)
            yield block[chunk], None if domain.targets is None else domain.targets[index][chunk]


def working_dtype(features: Tensor) -> torch.dtype:
    """Return float64 for float64 features, else float32."""
    return torch.float64 if features.dtype == torch.float64 else torch.float32


def logits_of(x: Tensor, router: Tensor) -> Tensor:
    """Return W x (+ b if the router has one more column than x), (tokens, experts)."""
    width = x.shape[1]
    z = x @ router[:, :width].T.to(x.dtype)
    return z if router.shape[1] == width else z + router[:, width].to(x.dtype)


# Smaller blocks of tokens are not worth a separate launch.
WORTH_A_LAUNCH = 1 << 17


class Features:
    """A block of features x, (tokens, d), of any dtype; products in plain torch.

    `columns` is d, or d + 1 with a column of ones.
    """

    def __init__(self, x: Tensor, columns: int) -> None:
        self.x = x
        self.columns = columns

    @cached_property
    def wide(self) -> Tensor:
        return self.x.double()

    @property
    def working(self) -> Tensor:
        return self.x.to(working_dtype(self.x))

    def logits(self, router: Tensor) -> Tensor:
        """Return X Wᵀ to at least float32's accuracy, (tokens, K) float64."""
        return logits_of(self.wide, router)

    def working_logits(self, router: Tensor) -> Tensor:
        """Return X Wᵀ in the working dtype, (tokens, K)."""
        return logits_of(self.working, router)

    def outer(self, u: Tensor) -> Tensor:
        """Return Σ u_t x_tᵀ to at least float32's accuracy, (K, columns) float64."""
        return self._outer(u, self.wide)

    def squares(self, h: Tensor) -> Tensor:
        """Return Σ h_t (x_t²)ᵀ to about float32's accuracy, (K, columns) float64; h >= 0."""
        narrow = self.working
        return self._outer(h.to(narrow.dtype), narrow * narrow)

    def add_curvature(
        self, out: Tensor, weights: TokenWeights, v: Tensor, factor: float, *, accurate: bool
    ) -> None:
        """Add `factor` Σ H_t (V x_t) x_tᵀ to `out`, (K, columns) float64.

        Unless `accurate`, V must be `representable`.
        """
        x = self.x.double() if accurate else self.working
        out.add_(self._outer(weights.apply(logits_of(x, v)), x), alpha=factor)

    def solver_logits(self, v: Tensor) -> Tensor:
        """Return X Vᵀ of a `representable` V, (tokens, K): the first half of `add_curvature`."""
        return self.working_logits(v)

    def moment(self, weights: TokenWeights, z: Tensor, projected: Tensor) -> Tensor:
        """Return Σ (H_t z_t) projected_tᵀ of logits z, (K, J) float64."""
        return (weights.apply(z).T @ projected).double()

    def add_weighted(
        self, out: Tensor, weights: TokenWeights, z: Tensor, shift: Shift | None, factor: float
    ) -> None:
        """Add `factor` Σ H_t (z_t + shift_t) x_tᵀ to `out`; z may be overwritten."""
        if shift is not None:
            z.addmm_(shift.projected, shift.coefficients.T.to(z.dtype))
        out.add_(self._outer(weights.apply(z), self.working), alpha=factor)

    def gram(self, weight: Tensor) -> Tensor:
        """Σ t_t x_t x_tᵀ, (columns, columns) in the working dtype: for preconditioners."""
        x = self.working
        if x.shape[1] < self.columns:
            x = torch.cat([x, x.new_ones(x.shape[0], 1)], dim=1)
        x = x * weight.to(x.dtype).sqrt().unsqueeze(-1)
        return x.T @ x

    def self_product(self, rows: Tensor) -> Tensor:
        """Return rowsᵀ rows of (tokens, m), for preconditioners."""
        return rows.T @ rows

    def representable(self, v: Tensor) -> Tensor:
        """Return the nearest vector that products use without rounding."""
        return v

    def _outer(self, u: Tensor, x: Tensor) -> Tensor:
        """Return uᵀ [x 1] without building [x 1]."""
        width = x.shape[1]
        product = (u.T @ x).double()
        if self.columns == width:
            return product
        return torch.cat([product, u.sum(dim=0, dtype=torch.float64).unsqueeze(1)], dim=1)


class FusedFeatures(Features):
    """bf16 features on a Hopper GPU, with the fused kernels."""

    def logits(self, router: Tensor) -> Tensor:
        return self.working_logits(router).double()

    def working_logits(self, router: Tensor) -> Tensor:
        return fused.logits(self.x, router, terms=ACCURATE.vector)

    def outer(self, u: Tensor) -> Tensor:
        return fused.outer(u, self.x, self.columns, terms=ACCURATE.weighted)

    def squares(self, h: Tensor) -> Tensor:
        return fused.outer(h, self.x, self.columns, terms=FAST.weighted, square=True)

    def add_curvature(
        self, out: Tensor, weights: TokenWeights, v: Tensor, factor: float, *, accurate: bool
    ) -> None:
        h, terms = (weights.diagonal, weights.rank_one), ACCURATE if accurate else FAST
        fused.add_product(out, self.x, *h, v, terms=terms, factor=factor)

    def solver_logits(self, v: Tensor) -> Tensor:
        return fused.logits(self.x, v, terms=FAST.vector)

    def moment(self, weights: TokenWeights, z: Tensor, projected: Tensor) -> Tensor:
        return fused.moment(z, weights.diagonal, weights.rank_one, projected, wide=False)

    def add_weighted(
        self, out: Tensor, weights: TokenWeights, z: Tensor, shift: Shift | None, factor: float
    ) -> None:
        h, terms = (weights.diagonal, weights.rank_one), FAST.weighted
        fused.add_weighted(out, self.x, *h, z, shift, terms=terms, factor=factor)

    def gram(self, weight: Tensor) -> Tensor:
        root = weight.sqrt().unsqueeze(-1).to(self.x.dtype)
        x = self.x * root
        gram = torch.mm(x.T, x, out_dtype=torch.float32)
        if self.columns == x.shape[1]:
            return gram
        # The bias column separately: a matrix with one more column would not be aligned.
        last = torch.mm(x.T, root, out_dtype=torch.float32)
        corner = root.float().square().sum().reshape(1, 1)
        return torch.cat([torch.cat([gram, last], dim=1), torch.cat([last.T, corner], dim=1)])

    def self_product(self, rows: Tensor) -> Tensor:
        # In two bf16 terms: float32 products would take five times as long.
        high, low = split(rows, 2)
        mixed = torch.mm(high.T, low, out_dtype=torch.float32)
        return torch.mm(high.T, high, out_dtype=torch.float32) + (mixed + mixed.T)

    def representable(self, v: Tensor) -> Tensor:
        return representable(v, FAST.vector)


def features_of(x: Tensor, columns: int) -> Features:
    """Return the features with the fastest products that support them."""
    return FusedFeatures(x, columns) if fused.usable(x) else Features(x, columns)


def coalesced(
    parts: Sequence[tuple[Tensor, TokenWeights]],
) -> Iterator[tuple[Tensor, TokenWeights]]:
    """Yield fewer, larger blocks for the kernels: adjacent ones as a view, small ones copied.

    Features for plain torch stay unchanged: their chunks fit the cache.
    """
    group: list[tuple[Tensor, TokenWeights]] = []
    for x, weights in parts:
        if group and not _belong(group, x):
            yield _join(group)
            group = []
        group.append((x, weights))
    if group:
        yield _join(group)


def _belong(group: Sequence[tuple[Tensor, TokenWeights]], x: Tensor) -> bool:
    blocks = [block for block, _ in group]
    if not (fused.usable(blocks[-1]) and fused.usable(x)):
        return False
    if _is_run([*blocks, x]):
        return True
    return max(sum(block.shape[0] for block in blocks), x.shape[0]) < WORTH_A_LAUNCH


def _join(group: Sequence[tuple[Tensor, TokenWeights]]) -> tuple[Tensor, TokenWeights]:
    blocks = [x for x, _ in group]
    weights = TokenWeights.joined([part for _, part in group])
    if len(blocks) == 1:
        return blocks[0], weights
    if _is_run(blocks):
        rows = sum(block.shape[0] for block in blocks)
        return blocks[0].as_strided((rows, blocks[0].shape[1]), blocks[0].stride()), weights
    return torch.cat(blocks), weights


def _is_run(blocks: Sequence[Tensor]) -> bool:
    """Return whether each block begins in memory at the end of the previous one."""
    return all(
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.stride() == other.stride()
        and one.storage_offset() + one.shape[0] * one.stride(0) == other.storage_offset()
        for one, other in pairwise(blocks)
    )
