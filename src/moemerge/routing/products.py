"""Products with a block of features, and who computes them.

Every quantity that the solver takes from the features is one of four products. Plain torch serves
any features on any device: in float64, or in float32 inside the solver. bf16 features on a GPU are
served by the fused kernels, which never copy them: exact products of bf16 terms, summed in float32
within a few thousand tokens and in float64 beyond.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from moemerge.kernels import fused, splitting
from moemerge.kernels.fused import Shift
from moemerge.kernels.splitting import representable
from moemerge.routing.domains import augmented, logits_of, working_dtype
from moemerge.routing.weights import TokenWeights

# Blocks of fewer tokens than this are not worth a launch of their own.
WORTH_A_LAUNCH = 1 << 17


class Precision(Enum):
    """Of a product with the curvature; plain torch has float32 for the first two, then float64."""

    COARSE = splitting.COARSE  # a solver's first steps
    FAST = splitting.FAST  # its later ones
    ACCURATE = splitting.ACCURATE  # what its result is judged by

    @property
    def terms(self) -> splitting.Terms:
        return self.value


class Features(ABC):
    """A block of features x, (tokens, d); `columns` is d, or d + 1 with a column of ones."""

    coarse_is_cheaper = False  # than FAST; where not, it is the same

    def __init__(self, x: Tensor, columns: int) -> None:
        self.x = x
        self.columns = columns

    @abstractmethod
    def logits(self, router: Tensor) -> Tensor:
        """X Wᵀ to at least float32's accuracy, (tokens, K) float64."""

    @abstractmethod
    def working_logits(self, router: Tensor) -> Tensor:
        """X Wᵀ in the working dtype, (tokens, K)."""

    @abstractmethod
    def outer(self, u: Tensor) -> Tensor:
        """Σ u_t x_tᵀ to at least float32's accuracy, (K, columns) float64."""

    @abstractmethod
    def squares(self, h: Tensor) -> Tensor:
        """Σ h_t (x_t²)ᵀ, about float32, (K, columns) float64; h is not negative."""

    @abstractmethod
    def add_curvature(
        self, out: Tensor, weights: TokenWeights, v: Tensor, precision: Precision, factor: float
    ) -> None:
        """Add `factor` Σ H_t (V x_t) x_tᵀ to `out`, (K, columns) float64.

        If not ACCURATE, V is `representable`.
        """

    @abstractmethod
    def solver_logits(self, v: Tensor, precision: Precision) -> Tensor:
        """X Vᵀ of a `representable` V, (tokens, K): the first half of `add_curvature`."""

    @abstractmethod
    def moment(self, weights: TokenWeights, z: Tensor, projected: Tensor) -> Tensor:
        """Σ (H_t z_t) projected_tᵀ of logits z, (K, J) float64."""

    @abstractmethod
    def add_weighted(
        self, out: Tensor, weights: TokenWeights, z: Tensor, shift: Shift | None, factor: float
    ) -> None:
        """Add `factor` Σ H_t (z_t + shift_t) x_tᵀ to `out`: the second half. z may be spoilt."""

    @abstractmethod
    def gram(self, weight: Tensor | None) -> Tensor:
        """Σ t_t x_t x_tᵀ, (columns, columns) in the working dtype: for preconditioners."""

    def representable(self, v: Tensor, precision: Precision) -> Tensor:
        """The nearest to v that `add_curvature` takes without rounding it."""
        return v


class PlainFeatures(Features):
    """Any features, by plain torch."""

    def __init__(self, x: Tensor, columns: int) -> None:
        super().__init__(x, columns)
        self._wide: Tensor | None = None

    @property
    def wide(self) -> Tensor:
        if self._wide is None:
            self._wide = self.x.double()
        return self._wide

    def logits(self, router: Tensor) -> Tensor:
        return logits_of(self.wide, router)

    def working_logits(self, router: Tensor) -> Tensor:
        return logits_of(self.x.to(working_dtype(self.x)), router)

    def outer(self, u: Tensor) -> Tensor:
        return self._outer(u, self.wide)

    def squares(self, h: Tensor) -> Tensor:
        narrow = self.x.to(working_dtype(self.x))
        return self._outer(h.to(narrow.dtype), narrow * narrow)

    def add_curvature(
        self, out: Tensor, weights: TokenWeights, v: Tensor, precision: Precision, factor: float
    ) -> None:
        accurate = precision is Precision.ACCURATE
        x = self.x.to(torch.float64 if accurate else working_dtype(self.x))
        out.add_(self._outer(weights.apply(logits_of(x, v)), x), alpha=factor)

    def solver_logits(self, v: Tensor, precision: Precision) -> Tensor:
        return self.working_logits(v)

    def moment(self, weights: TokenWeights, z: Tensor, projected: Tensor) -> Tensor:
        return (weights.apply(z).T @ projected).double()

    def add_weighted(
        self, out: Tensor, weights: TokenWeights, z: Tensor, shift: Shift | None, factor: float
    ) -> None:
        if shift is not None:
            z.addmm_(shift.projected, shift.coefficients.T.to(z.dtype))
        x = self.x.to(working_dtype(self.x))
        out.add_(self._outer(weights.apply(z), x), alpha=factor)

    def gram(self, weight: Tensor | None) -> Tensor:
        x = augmented(self.x.to(working_dtype(self.x)), self.columns)
        if weight is not None:
            x = x * weight.to(x.dtype).sqrt().unsqueeze(-1)
        return x.T @ x

    def _outer(self, u: Tensor, x: Tensor) -> Tensor:
        """uᵀ [x 1], without building [x 1]."""
        width = x.shape[1]
        product = (u.T @ x).double()
        if self.columns == width:
            return product
        return torch.cat([product, u.sum(dim=0, dtype=torch.float64).unsqueeze(1)], dim=1)


class FusedFeatures(Features):
    """bf16 features on a GPU, by the kernels."""

    coarse_is_cheaper = True

    def logits(self, router: Tensor) -> Tensor:
        return self.working_logits(router).double()

    def working_logits(self, router: Tensor) -> Tensor:
        return fused.logits(self.x, router, terms=splitting.ACCURATE.vector)

    def outer(self, u: Tensor) -> Tensor:
        return fused.outer(u, self.x, self.columns, terms=splitting.ACCURATE.weighted)

    def squares(self, h: Tensor) -> Tensor:
        return fused.outer(h, self.x, self.columns, terms=splitting.FAST.weighted, square=True)

    def add_curvature(
        self, out: Tensor, weights: TokenWeights, v: Tensor, precision: Precision, factor: float
    ) -> None:
        h = weights.diagonal, weights.rank_one
        fused.add_product(out, self.x, *h, v, terms=precision.terms, factor=factor)

    def solver_logits(self, v: Tensor, precision: Precision) -> Tensor:
        return fused.logits(self.x, v, terms=precision.terms.vector)

    def moment(self, weights: TokenWeights, z: Tensor, projected: Tensor) -> Tensor:
        return fused.moment(z, weights.diagonal, weights.rank_one, projected, wide=False)

    def add_weighted(
        self, out: Tensor, weights: TokenWeights, z: Tensor, shift: Shift | None, factor: float
    ) -> None:
        h, terms = (weights.diagonal, weights.rank_one), splitting.FAST.weighted
        fused.add_weighted(out, self.x, *h, z, shift, terms=terms, factor=factor)

    def gram(self, weight: Tensor | None) -> Tensor:
        x = self.x
        root = x.new_ones(len(x), 1) if weight is None else weight.sqrt().unsqueeze(-1).to(x.dtype)
        if weight is not None:
            x = x * root
        gram = torch.mm(x.T, x, out_dtype=torch.float32)
        if self.columns == x.shape[1]:
            return gram
        # The bias' column apart: a matrix one column wider would not be aligned.
        last = torch.mm(x.T, root, out_dtype=torch.float32)
        corner = root.float().square().sum().reshape(1, 1)
        return torch.cat([torch.cat([gram, last], dim=1), torch.cat([last.T, corner], dim=1)])

    def representable(self, v: Tensor, precision: Precision) -> Tensor:
        return v if precision is Precision.ACCURATE else representable(v, precision.terms.vector)


def features_of(x: Tensor, columns: int) -> Features:
    """The features with the products that suit them."""
    return FusedFeatures(x, columns) if fused.usable(x) else PlainFeatures(x, columns)


def coalesced(
    parts: Sequence[tuple[Tensor, TokenWeights]],
) -> Iterator[tuple[Tensor, TokenWeights]]:
    """Fewer, larger blocks for the kernels: neighbours in memory as one view, small ones copied.

    Features that plain torch serves stay as they are: its chunks fit the cache.
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
    """Whether each block begins in memory where the one before it ends."""
    return all(
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.stride() == other.stride()
        and one.storage_offset() + one.shape[0] * one.stride(0) == other.storage_offset()
        for one, other in pairwise(blocks)
    )
