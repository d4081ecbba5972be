"""Symmetric linear operators on matrices.

A router is a (K, d) matrix, and its curvature a (K·d, K·d) matrix that is never formed. Operators
therefore map (K, d) tensors to (K, d) tensors. A preconditioner is also an operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class LinearOperator(ABC):
    """A symmetric map from (K, d) tensors to (K, d) tensors.

    `mv` accepts any floating dtype and returns float64, whatever it computes in, so that a solver's
    vectors keep their precision.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self.shape = shape
        self.device = device

    @abstractmethod
    def mv(self, vector: Tensor) -> Tensor:
        """Apply the operator to a (K, d) tensor."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the operator's diagonal as a (K, d) tensor."""

    def representable(self, vector: Tensor) -> Tensor:
        """Round `vector` to the input precision of `mv`.

        If a solver's directions are such vectors, a coarse operator causes no input error.
        """
        return vector

    def as_matrix(self) -> Tensor:
        """Return the dense (K·d, K·d) matrix, row-major in (K, d), for tests and tiny problems."""
        size = self.shape[0] * self.shape[1]
        basis = torch.eye(size, dtype=torch.float64, device=self.device)
        columns = [self.mv(unit.reshape(self.shape)).reshape(-1) for unit in basis]
        return torch.stack(columns, dim=1).double()


class Identity(LinearOperator):
    """The identity; as a preconditioner, none."""

    def mv(self, vector: Tensor) -> Tensor:
        return vector.double()

    def diagonal(self) -> Tensor:
        return torch.ones(self.shape, dtype=torch.float64, device=self.device)


class Diagonal(LinearOperator):
    """Elementwise multiplication."""

    def __init__(self, values: Tensor) -> None:
        rows, columns = values.shape
        super().__init__((rows, columns), values.device)
        self.values = values.double()

    def mv(self, vector: Tensor) -> Tensor:
        return self.values * vector

    def diagonal(self) -> Tensor:
        return self.values

    def inverse(self) -> Diagonal:
        """Return the inverse; entries that are not positive become 1."""
        positive = self.values > 0
        safe = torch.where(positive, self.values, torch.ones_like(self.values))
        return Diagonal(1.0 / safe)


class Deflation(ABC):
    """A subspace Z on which a system is solved exactly, with A_Z⁻¹ = (ZᵀAZ)⁻¹.

    For any y (a preconditioned residual), s = y + Z A_Z⁻¹ Zᵀ (r − A y) leaves no residual in the
    subspace: Zᵀ(r − A s) = 0. CG with directions made of such s, from a start with Zᵀr = 0, does
    not see the eigenvalues of Z. The others are those of the preconditioned operator or between
    them, so the number of steps never increases.
    """

    @abstractmethod
    def restrict(self, vector: Tensor) -> Tensor:
        """Return Zᵀ v, in the shape of the subspace's coordinates."""

    @abstractmethod
    def prolong(self, coordinates: Tensor) -> Tensor:
        """Return Z c, (K, d) float64."""

    @abstractmethod
    def solve(self, coordinates: Tensor) -> Tensor:
        """Return (ZᵀAZ)⁻¹ c."""

    def corrected(
        self, operator: LinearOperator, y: Tensor | None, r: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return s = y + Z (ZᵀAZ)⁻¹ Zᵀ (r − A y) and A s; y is `representable`, or None for zero.

        This definition needs two products. Subclasses that know the operator need one.
        """
        rest = r if y is None else r - operator.mv(y)
        s = self.prolong(self.solve(self.restrict(rest)))
        if y is not None:
            s = y + s
        return s, operator.mv(s)
