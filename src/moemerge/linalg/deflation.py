"""A subspace on which a system is solved exactly, beside whatever preconditions the rest.

With Z its basis, A_Z = ZᵀAZ and y any vector (a preconditioned residual), the vector

    s = y + Z A_Z⁻¹ Zᵀ (r − A y)

leaves no residual in the subspace: Zᵀ(r − A s) = 0. CG whose directions are made of such s, from a
start with Zᵀr = 0, never meets the eigenvalues that belong to Z. The others are those of the
preconditioned operator or lie between them, so the steps become fewer and never more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from moemerge.linalg.operator import LinearOperator


class Deflation(ABC):
    """A subspace Z with its (ZᵀAZ)⁻¹."""

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
