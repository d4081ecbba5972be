"""Preconditioners of a router's linear system, and the choice between them.

* Jacobi: the diagonal.
* Blocks: the exact (d, d) block of A of each expert. Costs K weighted Gram matrices and K·d²
  memory, so it is for small d.
* Kronecker: Σ ≈ mean H ⊗ mean x xᵀ. With S = diag Σ known exactly and C_H, C_X the two factors
  scaled to unit diagonal, A ≈ S^½ (a C_H ⊗ C_X + c I) S^½. The eigenvectors of the two small
  matrices diagonalise the bracket including its damping. Blending each factor with its own diagonal
  instead would misplace the damping, and takes twice the steps.
* Two-level: A itself on the leading directions of the features (`leading`), and Jacobi or Kronecker
  for the rest.

For features without a mean and soft routers, Kronecker takes a dozen steps. If the tokens of one
expert differ from those of another (features with means and outlier channels, confident routers),
it takes hundreds or does not converge; the two-level method then takes 10 to 50. Blocks capture the
correlations within each expert's own tokens, which a common Gram matrix does not. They matter in
small models with little damping.

AUTO starts with the kind that should be cheapest, and switches to a more robust one if a solve is
slower than expected. The order is: Kronecker with a few directions, or blocks; then many
directions; then Jacobi, if even that breaks down. If Kronecker's factors indicate confident
routers, it starts with many directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from moemerge.routing.cg import Diagonal, Identity, LinearOperator, Patience
from moemerge.routing.curvature import RouterCurvature
from moemerge.routing.inverses import KroneckerFactors, block_inverse
from moemerge.routing.leading import (
    CHUNK,
    OVERSAMPLING,
    ROUNDS,
    SKETCH_TOKENS,
    LeadingDirections,
    directions_of,
    sketched_directions,
)

# Minimum damping of the Kronecker form, as a share of a. Its small eigenvalues are far from A's:
# with A's own damping of 1e-4 instead, CG takes four times the steps.
KRONECKER_DAMPING = 0.02
# The same for the rest below the leading directions, at α = 0.9: with 0.1 the most ill-conditioned
# features take a third more steps, with 0.8 the best-conditioned do. It falls with the square root
# of A's own damping. Newton systems have hardly any, and a first layer's eigenvalues span seven
# orders of magnitude: 0.4 took ten times the steps of 0.004 there.
REST_DAMPING, LEAST_REST_DAMPING, REST_MEASURED_AT = 0.4, 0.003, 0.1 / 0.9
# Directions that are combined with Kronecker at first. They cost almost nothing, and a single
# outlier direction would triple its steps.
FEW_DIRECTIONS = 4
# Routers count as confident up to this second-smallest eigenvalue of C_H (the smallest of a softmax
# is always 0): 0.8 to 0.95 when Kronecker converges well, 0.4 to 0.6 when it does not.
CONFIDENT = 0.75
# Maximum memory of the blocks.
BLOCK_BYTES = 2 << 30


class Preconditioner(StrEnum):
    """Kinds of preconditioners; AUTO chooses the fastest by a cost model."""

    AUTO = "auto"
    NONE = "none"
    JACOBI = "jacobi"
    BLOCK = "block"
    KRONECKER = "kronecker"
    TWO_LEVEL = "two-level"


@dataclass(frozen=True)
class BuiltPreconditioner:
    """A preconditioner ready for use.

    `jitter` is what made it definite (0: nothing was needed). `patience` is when to abandon it for
    the next one (None: never).
    """

    kind: Preconditioner
    operator: LinearOperator
    deflation: LeadingDirections | None = None
    jitter: float = 0.0
    patience: Patience | None = None


Steps = Mapping[Preconditioner, int]
# Steps to a residual of 1e-6 at α = 0.9, measured on features of trained models and on synthetic
# ones with means, outlier channels and confident routers. Only their ratios matter. Kronecker's
# include trials that were abandoned, and the steps of the two-level method after them.
SOLVE_STEPS: Steps = {
    Preconditioner.JACOBI: 400,
    Preconditioner.KRONECKER: 24,
    Preconditioner.BLOCK: 55,
    Preconditioner.TWO_LEVEL: 40,
}
# Steps of all Newton systems of a router together (`exact`), with little damping. Measured on
# features of models after long and short training (K 24 and 32, d 96 and 128), and on synthetic
# ones up to d 2048.
NEWTON_STEPS: Steps = {
    Preconditioner.JACOBI: 1500,
    Preconditioner.KRONECKER: 140,
    Preconditioner.BLOCK: 12,
    Preconditioner.TWO_LEVEL: 200,
}
# Kronecker is tried before the two-level method if it costs at most this multiple. It suffices for
# well-conditioned features, and its factors also precondition the rest of the two-level method.
TRIAL = 2.0
# When to abandon a solve with one kind for the next.
PATIENCE = {
    # With a few directions. Many directions cost as much as 8 (by arithmetic) to 25 steps (on a
    # GPU). In our measurements they were worth it if more than 24 further steps were expected.
    Preconditioner.KRONECKER: Patience(window=8, steps=24),
    Preconditioner.BLOCK: Patience(window=12, steps=60),
    Preconditioner.TWO_LEVEL: Patience(window=24, steps=150),
}


def attempts(
    operator: RouterCurvature, kind: Preconditioner, steps: Steps = SOLVE_STEPS
) -> Iterator[BuiltPreconditioner]:
    """Yield preconditioners to try in turn; each is built when it is reached.

    Any kind but AUTO is the only one. AUTO ends with those that are never abandoned.
    """
    if kind is not Preconditioner.AUTO:
        yield build(operator, kind)
        return
    first = Preconditioner.JACOBI
    if operator.dense > 0.0:
        first = choose(operator.shape, tokens_of(operator), operator.dtype, steps)
    factors = None
    if first is Preconditioner.BLOCK:
        yield replace(_block(operator), patience=PATIENCE[first])
    elif first is Preconditioner.KRONECKER:
        factors = KroneckerFactors.of(operator)
        if float(factors.values_h[:2].max()) > CONFIDENT:
            yield replace(_few_directions(operator, factors), patience=PATIENCE[first])
    if first is not Preconditioner.JACOBI:
        two_level = _two_level(operator, factors)
        if factors is not None:
            yield replace(two_level, patience=PATIENCE[Preconditioner.TWO_LEVEL])
        # The same directions with Jacobi for the rest: in exact arithmetic never slower than Jacobi
        # alone, which therefore only follows a breakdown.
        yield replace(two_level, operator=_jacobi(operator).operator)
    yield _jacobi(operator)


def build(
    operator: RouterCurvature, kind: Preconditioner, steps: Steps = SOLVE_STEPS
) -> BuiltPreconditioner:
    """Build a preconditioner; for AUTO the first one to try."""
    if kind is Preconditioner.AUTO:
        return next(attempts(operator, kind, steps))
    if kind is Preconditioner.JACOBI:
        return _jacobi(operator)
    if kind is Preconditioner.BLOCK:
        return _block(operator)
    if kind is Preconditioner.KRONECKER:
        return _kronecker(operator, KroneckerFactors.of(operator))
    if kind is Preconditioner.TWO_LEVEL:
        return _two_level(operator, None)
    return BuiltPreconditioner(kind, Identity(operator.shape, operator.device))


def _jacobi(operator: RouterCurvature) -> BuiltPreconditioner:
    return BuiltPreconditioner(Preconditioner.JACOBI, Diagonal(operator.diagonal()).inverse())


def _block(operator: RouterCurvature) -> BuiltPreconditioner:
    inverse, jitter = block_inverse(operator)
    return BuiltPreconditioner(Preconditioner.BLOCK, inverse, jitter=jitter)


def _kronecker(operator: RouterCurvature, factors: KroneckerFactors) -> BuiltPreconditioner:
    damping = max(operator.damping, KRONECKER_DAMPING * operator.dense)
    return BuiltPreconditioner(Preconditioner.KRONECKER, factors.inverse(operator, damping))


def _two_level(operator: RouterCurvature, factors: KroneckerFactors | None) -> BuiltPreconditioner:
    """The leading directions, with Kronecker for the rest if its factors are there."""
    count = direction_count(operator.shape, couples=operator.couples_experts)
    if factors is None:
        directions = sketched_directions(operator, count)
        rest: LinearOperator = _jacobi(operator).operator
    else:
        directions = directions_of(factors, operator, count)
        rest = factors.inverse(operator, max(operator.damping, _rest_damping(operator)))
    deflation = LeadingDirections(operator, directions)
    return BuiltPreconditioner(Preconditioner.TWO_LEVEL, rest, deflation, deflation.jitter)


def _rest_damping(operator: RouterCurvature) -> float:
    share = operator.damping / operator.dense / REST_MEASURED_AT
    wanted = REST_DAMPING * min(1.0, math.sqrt(share))
    return max(wanted, LEAST_REST_DAMPING) * operator.dense


def _few_directions(operator: RouterCurvature, factors: KroneckerFactors) -> BuiltPreconditioner:
    """Build Kronecker with a few of the leading directions."""
    count = max(1, min(FEW_DIRECTIONS, operator.shape[1] // 2))
    deflation = LeadingDirections(operator, directions_of(factors, operator, count))
    rest = _kronecker(operator, factors).operator
    return BuiltPreconditioner(Preconditioner.KRONECKER, rest, deflation, deflation.jitter)


# --- costs --------------------------------------------------------------------------------------

# Kronecker needs at least this many tokens per feature, since all experts share its Gram matrix.
# With two, it took 1000 steps and more, Jacobi at most 411.
LEAST_TOKENS = 4
# An eigendecomposition's time in n³ multiply-adds of a product: 6 (n = 2048) to 13 (n = 256).
EIGEN_COST = 10.0
# Cholesky and inverse: 1.3 to 4.
INVERSE_COST = 4.0
# Work (multiply-adds) below which call overhead dominates the time.
NEGLIGIBLE_WORK = 2e8
# Limits on the rows of A_Z and on the directions; a multiple of 8 suits the tensor cores.
MOST_ROWS, MOST_DIRECTIONS, LEAST_DIRECTIONS, DIRECTION_STEP = 4096, 64, 4, 8
# Computing A_Z may cost as much as this number of products with A.
BUILD_PRODUCTS = 10.0


def direction_count(shape: tuple[int, ...], *, couples: bool = True) -> int:
    """Return J, the number of leading directions for a router of this shape.

    A_Z takes N (K·J)² / 2 multiply-adds, or a K-th of that if H is diagonal. A product takes 2 N K
    d.
    """
    experts, width = shape
    count = MOST_DIRECTIONS
    if couples:
        affordable = math.isqrt(int(4 * BUILD_PRODUCTS * width / experts))
        count = min(count, affordable, MOST_ROWS // experts)
    if count > DIRECTION_STEP:
        count -= count % DIRECTION_STEP
    return max(1, min(max(count, LEAST_DIRECTIONS), width // 2))


@dataclass(frozen=True)
class Work:
    """Multiply-adds to build a preconditioner, and of one CG step with it."""

    build: float
    step: float


def works(shape: tuple[int, int], tokens: int) -> dict[Preconditioner, Work]:
    """Return the work of every kind that AUTO may choose."""
    experts, width = shape
    product = 2.0 * tokens * experts * width
    eigen = EIGEN_COST * (width**3 + experts**3)
    blocks = experts * (tokens * width**2 + INVERSE_COST * width**3)
    count = direction_count(shape)
    rows = experts * count
    sketch = 2.0 * (ROUNDS + 1) * min(tokens, SKETCH_TOKENS) * width * (count + OVERSAMPLING)
    leading = tokens * (rows**2 / 2.0 + width * count) + INVERSE_COST * rows**3
    return {
        Preconditioner.JACOBI: Work(0.0, product),
        Preconditioner.KRONECKER: Work(
            tokens * width**2 + eigen, product + 2.0 * experts * width * (width + experts)
        ),
        Preconditioner.BLOCK: Work(blocks, product + 1.0 * experts * width**2),
        Preconditioner.TWO_LEVEL: Work(
            sketch + leading, product + 2.0 * tokens * experts * count + 1.0 * rows**2
        ),
    }


def costs(
    shape: tuple[int, int], tokens: int, dtype: torch.dtype, steps: Steps = SOLVE_STEPS
) -> dict[Preconditioner, float]:
    """Return the expected multiply-adds of a whole solve, for the kinds that fit in memory."""
    experts, width = shape
    known = works(shape, tokens)
    if experts * width**2 * dtype.itemsize > BLOCK_BYTES:
        del known[Preconditioner.BLOCK]
    if tokens < LEAST_TOKENS * width:
        del known[Preconditioner.KRONECKER]
    return {kind: work.build + steps[kind] * work.step for kind, work in known.items()}


def choose(
    shape: tuple[int, int], tokens: int, dtype: torch.dtype, steps: Steps = SOLVE_STEPS
) -> Preconditioner:
    """Return the kind with the least expected work; blocks if the work is negligible."""
    expected = costs(shape, tokens, dtype, steps)
    if expected.get(Preconditioner.BLOCK, float("inf")) < NEGLIGIBLE_WORK:
        return Preconditioner.BLOCK
    best = min(expected, key=lambda kind: expected[kind])
    trial = expected.get(Preconditioner.KRONECKER, float("inf"))
    promising = steps[Preconditioner.KRONECKER] < steps[Preconditioner.TWO_LEVEL]
    if best is Preconditioner.TWO_LEVEL and promising and trial < TRIAL * expected[best]:
        return Preconditioner.KRONECKER
    return best


def tokens_of(operator: RouterCurvature) -> int:
    return sum(domain.tokens for domain in operator.curvatures)


def steps_to_build(operator: RouterCurvature, kind: Preconditioner) -> float:
    """Return the number of CG steps that cost as much as building a preconditioner."""
    work = works(operator.shape, tokens_of(operator)).get(kind)
    return 0.0 if work is None else work.build / work.step


# Matrices in memory. Kronecker: Gram matrix, eigenvectors and workspace. Blocks: a block, its
# factor, its inverse and workspace. Two-level: A_Z, its factor, its inverse and temporaries.
KRONECKER_MATRICES, BLOCK_MATRICES, LEADING_MATRICES = 8, 4, 5


def matrix_bytes(
    kind: Preconditioner, shape: tuple[int, int], tokens: int, dtype: torch.dtype
) -> int:
    """Return the peak memory of building a preconditioner and solving with it, without vectors.

    For AUTO, the maximum over its attempts, for one system or for Newton's.
    """
    experts, width = shape
    if kind is Preconditioner.AUTO:
        firsts = {choose(shape, tokens, dtype, steps) for steps in (SOLVE_STEPS, NEWTON_STEPS)}
        needed = [matrix_bytes(first, shape, tokens, dtype) for first in firsts]
        leading = matrix_bytes(Preconditioner.TWO_LEVEL, shape, tokens, dtype)
        if Preconditioner.KRONECKER in firsts:  # whose factors also precondition the rest
            leading += matrix_bytes(Preconditioner.KRONECKER, shape, tokens, dtype)
        return max(*needed, leading)
    if kind is Preconditioner.KRONECKER:
        return KRONECKER_MATRICES * width**2 * dtype.itemsize
    if kind is Preconditioner.BLOCK:
        return BLOCK_MATRICES * experts * width**2 * dtype.itemsize
    if kind is Preconditioner.TWO_LEVEL:
        count = direction_count(shape)
        chunk = min(CHUNK, tokens * experts * count)
        # Logits of all tokens and their coordinates; a chunk of v ⊗ x̂ with its terms.
        tall = (tokens * (experts + count) + 2 * chunk) * dtype.itemsize
        return tall + LEADING_MATRICES * (experts * count) ** 2 * torch.float64.itemsize
    return 0
