"""Matrix-free linear operators and the conjugate gradient method."""

from moemerge.linalg.cg import (
    CGResult,
    Deflation,
    Diagonal,
    Ending,
    Identity,
    LinearOperator,
    Patience,
    Resting,
    Status,
    cg,
)

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
