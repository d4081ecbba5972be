"""Matrix-free linear operators and the conjugate gradient method."""

from moemerge.linalg.cg import CGResult, Ending, Patience, Resting, Status, cg
from moemerge.linalg.operator import Deflation, Diagonal, Identity, LinearOperator

__all__ = [
    "CGResult",
    "Deflation",
    "Diagonal",
    "Ending",
    "Identity",
    "LinearOperator",
    "Patience",
    "Resting",
    "Status",
    "cg",
]
