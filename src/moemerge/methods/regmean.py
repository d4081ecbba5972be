"""Methods that use the models' inputs: RegMean (Jin et al. 2023), LOT and CAT (Sun et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.config.parameters import BasePolicy
from moemerge.errors import NumericalError
from moemerge.methods._arithmetic import (
    ErrorWeight,
    average,
    from_base,
    params_shares,
    statistics_of,
)
from moemerge.methods._spectra import nearest_orthogonal
from moemerge.methods.method import (
    ModelTensor,
    Remark,
    UnitInfo,
    UnitStatistics,
    merge_method,
    param,
)
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

# Gram matrices are stored in float32. The rounding error of a wide one is about 1e-6 of its
# diagonal, so directions with hardly more than that must not be corrected. Jitter starts there and
# leaves them at the average.
LEAST_PIVOT = 1e-5
MOST_JITTER = 1e-2
# Elements of a layer that are solved for at once; limits the float64 copies of a head.
CPU_SOLVE_ELEMENTS = 2**22
DEVICE_SOLVE_ELEMENTS = 2**26


@dataclass(frozen=True)
class RegMeanOptions:
    factor: float = param(
        0.9, minimum=0, maximum=1, help="factor on the Gram matrices' off-diagonals"
    )
    normalize: bool = param(
        True, help="each model's text counts the same, however long; otherwise each token"
    )
    min_tokens: int = param(
        16, minimum=0, help="an expert with fewer tokens in a model is pulled towards the anchor"
    )
    anchor: str = param(
        "average",
        choices=("average", "base"),
        help="result in directions without inputs: the models' average, or the base_model",
    )

    @property
    def needs_base(self) -> str | None:
        """Return the option that needs the base's weights, if any."""
        return "`anchor: base`" if self.anchor == "base" else None


@merge_method(
    "regmean",
    base=BasePolicy.DONOR,
    per_model=ErrorWeight,
    options=RegMeanOptions,
    statistics="gram",
    weights=params_shares,
    time="decompositions",
)
def regmean(
    inputs: Sequence[ModelTensor], base: Tensor | None, options: RegMeanOptions, unit: UnitInfo
) -> Tensor:
    """Least squared error of each linear layer's output on the models' own inputs.

    With G_i = Σ x xᵀ over the tokens that model i sent through the layer (an expert's are those
    routed to it), divided by the number of all its tokens, off-diagonals times `factor`:
    W = (Σ w_i W_i G_i) (Σ w_i G_i)⁻¹. Directions without inputs stay at the `anchor`. All tensors
    other than linear layers are averaged.
    """
    weights = params_shares([i.params for i in inputs], options, unit)
    statistics = statistics_of(inputs, unit)
    mean = average(inputs, weights)
    if statistics is None:
        return mean
    few = _few_tokens(inputs, statistics, options, unit)
    lengths = [float(s.domain_tokens) if options.normalize else 1.0 for s in statistics]
    counts = [s.tokens for s in statistics]
    grams = Grams(
        [s.values for s in statistics],
        [n / length for n, length in zip(counts, lengths, strict=True)],
        weights,
        options.factor,
    )
    made_up = few * len(lengths) / sum(lengths)
    solver = Solver.of(grams.sum(counts, made_up), unit)
    tensors = [i.tensor for i in inputs]
    if options.anchor == "base":
        assert base is not None
        moments = [grams.moment(i) for i in range(len(inputs))]  # each (in, in)
        out = base.clone(memory_format=torch.contiguous_format)
        return corrected(out, base, list(zip(tensors, moments, strict=True)), solver, unit)
    excesses = [grams.excess(i) for i in range(1, len(inputs))]
    others = list(zip(tensors[1:], excesses, strict=True))
    return corrected(mean, tensors[0], others, solver, unit)


def corrected(
    out: Tensor,
    origin: Tensor,
    terms: Sequence[tuple[Tensor, Tensor]],
    solver: Solver,
    unit: UnitInfo,
    factor: float = 1.0,
) -> Tensor:
    """Add factor (Σ (W_i - origin) M_i) S⁻¹ to `out` in place and return it.

    The terms are pairs of W_i (out, in) and M_i (in, in).
    """
    step = solve_rows(out)
    for start in range(0, out.shape[0], step):
        unit.check_stopped()
        rows = slice(start, start + step)
        right = torch.zeros_like(out[rows], dtype=torch.float64)  # (rows, in)
        for tensor, matrix in terms:
            right.addmm_(tensor[rows].double() - origin[rows].double(), matrix)
        out[rows] += factor * solver.solve(right).to(out.dtype)
    return out


def _few_tokens(
    inputs: Sequence[ModelTensor],
    statistics: Sequence[UnitStatistics],
    options: RegMeanOptions,
    unit: UnitInfo,
) -> int:
    """Return how many tokens the model with the fewest has below `min_tokens`."""
    counts = {
        i.name: s.tokens for i, s in zip(inputs, statistics, strict=True) if i.params.weight > 0
    }
    missing = max(0, options.min_tokens - min(counts.values()))
    if missing:
        near_base = options.anchor == "base"
        unit.remark(Remark.NEAR_BASE if near_base else Remark.FEW_TOKENS, counts)
    return missing


def solve_rows(matrix: Tensor) -> int:
    """Return the number of rows of a layer that are solved for together."""
    elements = CPU_SOLVE_ELEMENTS if matrix.device.type == "cpu" else DEVICE_SOLVE_ELEMENTS
    return max(1, elements // max(1, matrix.shape[1]))


@dataclass
class Grams:
    """The second moments S_i = c_i G_i of the models' inputs, and terms of the solution.

    As a correction to the average W̄ = Σ w_i W_i, the solution is
    W̄ + (Σ_i w_i (W_i - W_1) (S_i - S)) S⁻¹ with S = Σ w_i S_i. This needs one product less than the
    usual form and is exact if the models agree. Regularising S pulls the result to the average.
    As a correction to the base it is θ_0 + (Σ_i w_i (W_i - θ_0) S_i) S⁻¹, pulled to θ_0.
    """

    grams: Sequence[Tensor]  # each (in, in), mean of x xᵀ
    scales: Sequence[float]
    weights: Sequence[float]
    factor: float

    def __post_init__(self) -> None:
        pairs = zip(self.weights, self.scales, strict=True)
        self.mean = self._combine([w * c for w, c in pairs])

    def moment(self, i: int) -> Tensor:
        """Return w_i S_i, damped."""
        return self._damp(self.grams[i].double().mul_(self.scales[i] * self.weights[i]))

    def excess(self, i: int) -> Tensor:
        """Return w_i (S_i - S), damped."""
        excess = self.grams[i].double().mul_(self.scales[i]).sub_(self.mean)
        return self._damp(excess.mul_(self.weights[i]))

    def sum(self, counts: Sequence[int], made_up: float) -> Tensor:
        """Return S, damped, plus `made_up` times the mean x xᵀ of all models' tokens.

        The second term is the same for all models. It pulls an expert that a model hardly visited
        towards the anchor, in the metric of its inputs in the other models. The error on the tokens
        seen is never larger than that of averaging.
        """
        total = self.mean.clone()
        if made_up and sum(counts):
            total += self._combine([made_up * n / sum(counts) for n in counts])
        return self._damp(total)

    def _combine(self, factors: Sequence[float]) -> Tensor:
        total = self.grams[0].double().mul_(factors[0])
        for gram, factor in zip(self.grams[1:], factors[1:], strict=True):
            total.add_(gram, alpha=factor)
        return total

    def _damp(self, matrix: Tensor) -> Tensor:
        diagonal = matrix.diagonal().clone()
        matrix.mul_(self.factor)
        matrix.diagonal().copy_(diagonal)
        return matrix


@dataclass(frozen=True)
class Solver:
    """Solves X A = B for a positive definite A, by Cholesky of A scaled to unit diagonal."""

    lower: Tensor  # (in, in)
    scale: Tensor  # (in,): 1/√diag A; a feature that never occurs has 1

    @classmethod
    def of(cls, matrix: Tensor, unit: UnitInfo) -> Solver:
        """Factor A plus the smallest jitter·diag A that makes it definite; remark on the jitter."""
        diagonal = matrix.diagonal().clone()
        scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt_()
        matrix = matrix.mul_(scale).mul_(scale[:, None])
        jitter = 0.0
        while jitter <= MOST_JITTER:
            matrix.diagonal().fill_(1.0 + jitter)
            lower, failed = torch.linalg.cholesky_ex(matrix)
            if not bool(failed) and float(lower.diagonal().min()) ** 2 >= LEAST_PIVOT:
                if jitter:
                    unit.remark(Remark.JITTER, {"jitter": jitter})
                return cls(lower, scale)
            jitter = 10 * jitter or LEAST_PIVOT
        raise NumericalError(
            f"{unit.key}: the statistics hold no positive semidefinite matrix",
            hint="the file is damaged: make it again with `moemerge stats`",
        )

    def solve(self, right: Tensor) -> Tensor:
        """Return X for B of shape (rows, in)."""
        solution = torch.cholesky_solve((right * self.scale).T, self.lower).T
        return solution * self.scale


@dataclass(frozen=True)
class LotOptions:
    lambda_: float = param(1.0, key="lambda", help="factor on the merged task vector")
    normalize: bool = param(
        True, help="each model's text counts the same, however long; otherwise each token"
    )


@merge_method(
    "lot",
    base=BasePolicy.REQUIRED,
    per_model=ErrorWeight,
    options=LotOptions,
    statistics="gram",
    weights=params_shares,
    time="decompositions",
)
def lot(inputs: Sequence[ModelTensor], base: Tensor, options: LotOptions, unit: UnitInfo) -> Tensor:
    """Least squared error of each linear layer's change on the models' own inputs.

    With G_i as in `regmean`: θ_0 + λ (Σ w_i τ_i G_i) (Σ w_i G_i)⁻¹. In directions without inputs
    the result is the base; RegMean's is the average. With λ = 1 it equals `regmean` with
    `anchor: base`, `factor: 1` and `min_tokens: 0`. All tensors other than linear layers are
    averaged.
    """
    weights = params_shares([i.params for i in inputs], options, unit)
    statistics = statistics_of(inputs, unit)
    if statistics is None:
        return average(inputs, weights)
    lengths = [float(s.domain_tokens) if options.normalize else 1.0 for s in statistics]
    shares = [w * s.tokens / n for w, s, n in zip(weights, statistics, lengths, strict=True)]
    out = base.clone(memory_format=torch.contiguous_format)
    if not any(shares):  # no token of any model reached the layer
        return out
    grams = [s.values.double().mul_(c) for s, c in zip(statistics, shares, strict=True)]
    solver = Solver.of(torch.stack(grams).sum(0), unit)
    terms = [(i.tensor, gram) for i, gram in zip(inputs, grams, strict=True)]
    return corrected(out, base, terms, solver, unit, options.lambda_)


@dataclass(frozen=True)
class SltaOptions:
    ridge: float = param(
        1e-3, minimum=0, help="ridge towards equal coefficients, relative to their scale"
    )


@merge_method("slta", base=BasePolicy.REQUIRED, options=SltaOptions, statistics="gram")
def slta(
    inputs: Sequence[ModelTensor], base: Tensor, options: SltaOptions, unit: UnitInfo
) -> Tensor:
    """θ_0 + Σ a_i τ_i with the coefficients that answer the models' own inputs best.

    Least squares of Σ_t ‖(Σ a_i τ_i - τ_t) x‖² over the inputs x of every model t: A a = b with
    A_ij = Σ_t tr(τ_i G_t τ_jᵀ) and b_i = Σ_t tr(τ_i G_t τ_tᵀ). It has one unknown per model, so it
    also works for experts that few tokens reach. All tensors other than linear layers are averaged.
    """
    statistics = statistics_of(inputs, unit)
    if statistics is None:
        return average(inputs)
    vectors = [i.tensor.double() - base.double() for i in inputs]
    n = len(vectors)
    a = torch.zeros(n, n, dtype=torch.float64, device=base.device)
    b = torch.zeros(n, dtype=torch.float64, device=base.device)
    for t, known in enumerate(statistics):
        unit.check_stopped()
        gram = known.values.double() * (known.tokens / known.domain_tokens)
        answers = [vector @ gram for vector in vectors]
        inner = torch.stack([torch.stack([(y * v).sum() for v in vectors]) for y in answers])
        a += inner
        b += inner[:, t]
    return from_base(base, inputs, equal_share_ridge(a, b, options.ridge).tolist())


def equal_share_ridge(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    """Return the minimiser of the quadratic with a ridge towards 1/n."""
    n = len(b)
    scale = float(a.diagonal().mean())
    equal = torch.full_like(b, 1 / n)
    if scale <= 0:
        return equal
    # Always use a ridge: equal models make A singular.
    pull = max(ridge, n * torch.finfo(a.dtype).eps) * scale
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    solution: Tensor = torch.linalg.solve(a + pull * eye, b + pull * equal)
    return solution


# Relative to a task vector's norm: a smaller trimmed vector is rounding error.
_NOTHING_LEFT = 1e-6


@dataclass(frozen=True)
class CatOptions:
    directions: int = param(2, minimum=0, help="how many directions each model is protected in")
    penalty: float = param(
        0.5, minimum=0, help="weight of a direction's use to its own model against trimming it"
    )
    lambda_: float = param(1.0, key="lambda", help="factor on the sum of the trimmed task vectors")


@merge_method(
    "cat", base=BasePolicy.REQUIRED, options=CatOptions, statistics="gram", time="decompositions"
)
def cat(inputs: Sequence[ModelTensor], base: Tensor, options: CatOptions, unit: UnitInfo) -> Tensor:
    """Trim the outputs of other models' task vectors that disturb a model's own inputs most.

    For each model i, B_i are the leading eigenvectors of Σ_{j≠i} τ_j (G_i - penalty·G_j) τ_jᵀ;
    every τ_j loses the span of the other models' B_i and keeps its size, and the result is
    θ_0 + λ Σ τ_j. Only eigenvectors with positive eigenvalues are trimmed: the others help their
    model more than they disturb. All tensors other than linear layers are averaged.
    """
    statistics = statistics_of(inputs, unit)
    if statistics is None or not base.numel():
        return average(inputs)
    grams = [s.values.double() * (s.tokens / s.domain_tokens) for s in statistics]
    vectors = [i.tensor.double() - base.double() for i in inputs]
    bases = []
    for i in range(len(vectors)):
        unit.check_stopped()
        bases.append(_disturbing(i, vectors, grams, options))
    total = torch.zeros_like(vectors[0])
    for j, vector in enumerate(vectors):
        others = torch.cat([basis for i, basis in enumerate(bases) if i != j] or [vector[:, :0]], 1)
        span = nearest_orthogonal(others)  # all at once, so that order does not matter
        trimmed = vector - span @ (span.T @ vector)
        before, after = torch.linalg.vector_norm(vector), torch.linalg.vector_norm(trimmed)
        if bool(after > _NOTHING_LEFT * before):
            total += trimmed * (before / after)
    return (base + options.lambda_ * total).to(base.dtype).contiguous()


def _disturbing(
    i: int, vectors: Sequence[Tensor], grams: Sequence[Tensor], options: CatOptions
) -> Tensor:
    """Return the output directions, (out, few), that others change most on model i's inputs."""
    out = vectors[i].shape[0]
    total = torch.zeros(out, out, dtype=torch.float64, device=vectors[i].device)
    for j, vector in enumerate(vectors):
        if j != i:
            total += vector @ (grams[i] - options.penalty * grams[j]) @ vector.T
    values, basis = torch.linalg.eigh(total)
    floor = values.abs().max() * out * torch.finfo(values.dtype).eps
    count = min(options.directions, int((values > floor).sum()))
    leading: Tensor = basis[:, out - count :]
    return leading
