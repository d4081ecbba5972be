"""Symmetric linear operators on matrices: what a solver needs to know, and no more.

A router is a (K, d) matrix, and its curvature a (K·d, K·d) one that is never formed. Operators
therefore map (K, d) tensors to (K, d) tensors. A preconditioner is just another operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LinearOperator(ABC):
    """A symmetric map from (K, d) tensors to (K, d) tensors.

    `mv` takes any floating dtype and answers in float64, whatever it computes in, so that a
    solver's vectors keep their digits.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        self.device = device

    @abstractmethod
    def mv(self, vector: Tensor) -> Tensor:
        """The operator applied to a (K, d) tensor."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The operator's diagonal, as a (K, d) tensor."""

    def representable(self, vector: Tensor) -> Tensor:
        """The nearest to `vector` that `mv` takes without rounding it.

        A solver whose directions are such vectors sees no error from a coarse operator's input.
        """
        return vector

    def as_matrix(self) -> Tensor:
        """The dense (K·d, K·d) twin, row-major in (K, d): for tests and tiny problems."""
        size = self.shape[0] * self.shape[1]
        basis = torch.eye(size, dtype=torch.float64, device=self.device)
        columns = [self.mv(unit.reshape(self.shape)).reshape(-1) for unit in basis]
        return torch.stack(columns, dim=1).double()


class Identity(LinearOperator):
    """Leaves everything as it is; as a preconditioner, none."""

    def mv(self, vector: Tensor) -> Tensor:
        return vector.double()

    def diagonal(self) -> Tensor:
        return torch.ones(self.shape, dtype=torch.float64, device=self.device)


class Diagonal(LinearOperator):
    """Multiplies entry by entry."""

    def __init__(self, values: Tensor) -> None:
        rows, columns = values.shape
        super().__init__((rows, columns), values.device)
        self.values = values.double()

    def mv(self, vector: Tensor) -> Tensor:
        return self.values * vector

    def diagonal(self) -> Tensor:
        return self.values

    def inverse(self) -> Diagonal:
        """The inverse where the diagonal is positive; a zero row or column is left alone (1)."""
        positive = self.values > 0
        safe = torch.where(positive, self.values, torch.ones_like(self.values))
        return Diagonal(1.0 / safe)


class Deflation(ABC):
    """A subspace Z on which a system is solved exactly, with its A_Z⁻¹ = (ZᵀAZ)⁻¹.

    With y any vector (a preconditioned residual), s = y + Z A_Z⁻¹ Zᵀ (r − A y) leaves no residual
    in the subspace: Zᵀ(r − A s) = 0. CG whose directions are made of such s, from a start with
    Zᵀr = 0, never meets the eigenvalues that belong to Z. The others are those of the
    preconditioned operator or lie between them, so the steps become fewer and never more.
    """

    @abstractmethod
    def restrict(self, vector: Tensor) -> Tensor:
        """Zᵀ v, in whatever shape the subspace's coordinates have."""

    @abstractmethod
    def prolong(self, coordinates: Tensor) -> Tensor:
        """Z c, (K, d) float64."""

    @abstractmethod
    def solve(self, coordinates: Tensor) -> Tensor:
        """(ZᵀAZ)⁻¹ c."""

    def corrected(
        self, operator: LinearOperator, y: Tensor | None, r: Tensor
    ) -> tuple[Tensor, Tensor]:
        """s = y + Z (ZᵀAZ)⁻¹ Zᵀ (r − A y), and A s; y is `representable`, None is zero.

        This is the definition, for two products. Subclasses that know the operator need one.
        """
        rest = r if y is None else r - operator.mv(y)
        s = self.prolong(self.solve(self.restrict(rest)))
        if y is not None:
            s = y + s
        return s, operator.mv(s)
