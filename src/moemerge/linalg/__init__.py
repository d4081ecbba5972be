"""Matrix-free linear operators and the conjugate gradient method."""

from moemerge.linalg.cg import CGResult, Status, cg
from moemerge.linalg.operator import Diagonal, Identity, LinearOperator

__all__ = ["CGResult", "Diagonal", "Identity", "LinearOperator", "Status", "cg"]
