"""Least squares of one linear map: weighted sums over tokens, the closed form, and the choice of λ.

min_Δ Σ_t s_t² ‖r_t − Δ x_t‖² + λ mean(diag G) ‖Δ‖²  ⇒  Δ = C (G + λ mean(diag G) I)⁻¹,
with W = W_merged + Δ. λ is in units of the inputs' mean square, so it means the same for every map.
As λ → ∞ the map keeps its merged weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moemerge.checkpoint.quantised.tensor import Rounding
from moemerge.errors import NumericalError
from moemerge.kernels import long_sums
from moemerge.routing.search import lowest
from moemerge.runtime.ranks import Ranks

HALF = (torch.bfloat16, torch.float16)
# Tokens that are converted to float64 at a time. Products are float64 whatever the inputs are:
# hidden states have channels far from zero. With float32 sums, the difference of two such channels
# is off by 1e-3, and a small λ passes that on to the map. With rounded inputs it is ten times that.
# Many bf16 inputs on a GPU use sums that are float32 over a few hundred tokens only (`long_sums`).
# They are three times as fast, and maps are off by less than a thousandth of their update, far less
# than rounding to bf16 changes.
CHUNK = {"cpu": 1024, "cuda": 8192}
# Number of eight-bit terms that represent weighted inputs and residuals in that case.
TERMS = 2
# Columns of a Gram that are computed together; each pair of groups is computed once. A GPU needs
# larger groups to be busy.
GRAM_COLUMNS = {"cpu": 512, "cuda": 1024}


@dataclass
class FitSums:
    """The problem min_Δ Σ_t s_t² ‖r_t − Δ x_t‖² of a map with inputs x and residual outputs r.

    gram = Σ s² x xᵀ (in, in), cross = Σ s² r xᵀ (out, in), energy = Σ s² ‖r‖², all in float64.
    Tokens are added in order, so the last bits depend on it.
    """

    gram: Tensor
    cross: Tensor
    energy: Tensor  # a scalar
    tokens: int = 0

    @classmethod
    def empty(cls, outputs: int, inputs: int, device: torch.device) -> FitSums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(zeros(inputs, inputs), zeros(outputs, inputs), zeros())

    def sharing_gram(self, outputs: int) -> FitSums:
        """Return sums of another map with the same inputs, without its own part."""
        inputs = self.gram.shape[0]
        fresh = FitSums.empty(outputs, inputs, self.gram.device)
        fresh.gram, fresh.tokens = self.gram, self.tokens
        return fresh

    def add(
        self,
        x: Tensor,
        missing: Tensor,
        scale: Tensor,
        *,
        factor: Tensor | float = 1.0,
        gram: bool = True,
    ) -> None:
        """Add tokens: x (n, in), `missing` (n, out), `scale` (n,) with s of each, or one for all.

        The map reads `factor` times x, (n, 1) or one for all. Without `gram`, the inputs were
        already added for another map (`sharing_gram`).
        """
        if x.shape[0] == 0:
            return
        s = scale.reshape(-1, 1).double()
        if long_sums.serves(x):
            self._add_terms(x, missing, s, factor, gram=gram)
        else:
            self._add_wide(x, missing, s, factor, gram=gram)
        if gram:
            self.tokens += x.shape[0]

    def _add_wide(
        self, x: Tensor, missing: Tensor, s: Tensor, factor: Tensor | float, *, gram: bool
    ) -> None:
        """Add in float64."""
        inputs = s * factor
        for part in _chunks(x.shape[0], x.device):
            scaled_x, scaled_r = x[part].double() * _of(inputs, part), missing[part].double()
            scaled_r *= _of(s, part)
            self.energy += scaled_r.square().sum()
            self.cross.addmm_(scaled_r.T, scaled_x)
            if gram:
                add_gram(self.gram, scaled_x)

    def _add_terms(
        self, x: Tensor, missing: Tensor, s: Tensor, factor: Tensor | float, *, gram: bool
    ) -> None:
        """Add with `long_sums`: x stays bf16, and all weights are applied to the other side."""
        # float32 is enough for one token; otherwise torch would copy `missing` to float64.
        sizes = torch.linalg.vector_norm(missing, dim=1, keepdim=True)
        self.energy += (s * sizes).square().sum()
        long_sums.add_product(self.cross, missing, x, TERMS, s.square() * factor)
        if gram:
            long_sums.add_gram(self.gram, x, TERMS, (s * factor).square())

    def add_up(self, ranks: Ranks, owner: int = 0, *, gram: bool = True) -> None:
        """Sum over all ranks: rank `owner` gets the sums, and all ranks the number of tokens."""
        if gram:
            self.tokens = ranks.total(self.tokens, self.gram.device)
        if self.tokens:
            ranks.reduce_to(owner, self.cross, self.energy, *([self.gram] if gram else []))

    def error(self, update: Tensor) -> float:
        """Return Σ s² ‖r − Δ x‖² at Δ = `update` (out, in)."""
        step = update.double()
        fit = (step @ self.gram - 2.0 * self.cross).mul_(step).sum()
        return max(0.0, float(self.energy + fit))


def add_gram(gram: Tensor, x: Tensor) -> None:
    """Add xᵀ x of x (tokens, in): compute the part above the diagonal, then mirror it."""
    width, size = x.shape[1], GRAM_COLUMNS.get(x.device.type, GRAM_COLUMNS["cpu"])
    groups = [(b, min(b + size, width)) for b in range(0, width, size)]
    for begin, end in groups:
        gram[:end, begin:end].addmm_(x[:, :end].T, x[:, begin:end])
    for begin, end in groups:
        gram[begin:end, :begin] = gram[:begin, begin:end].T


def _of(weights: Tensor, part: slice) -> Tensor:
    return weights if weights.shape[0] == 1 else weights[part]


def _chunks(tokens: int, device: torch.device) -> list[slice]:
    size = CHUNK.get(device.type, CHUNK["cpu"])
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


# --- domains and maps ---------------------------------------------------------------------------


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors by rows; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def parameter(model: nn.Module, name: str) -> Tensor:
    """Return a parameter by its name in memory, to be read or written in place."""
    return model.get_parameter(name).detach()


@dataclass(frozen=True)
class Affine:
    """y = W x + b with float32 accuracy at least, whatever dtype the weights have."""

    weight: Tensor  # (out, in)
    bias: Tensor | None  # (out,)

    @classmethod
    def of(cls, model: nn.Module, weight: str) -> Affine:
        """Return the map of a linear module, by the name of its weight in memory."""
        path, _, _ = weight.rpartition(".")
        bias = getattr(model.get_submodule(path), "bias", None)
        return cls(parameter(model, weight), bias.detach() if isinstance(bias, Tensor) else None)

    def widened(self) -> Affine:
        """On a CPU, convert the weight to float32 once for all tokens."""
        if self.weight.dtype in HALF and self.weight.device.type != "cuda":
            return Affine(self.weight.float(), self.bias)
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Map (tokens, in) to (tokens, out)."""
        if x.dtype in HALF and x.device.type == "cuda" and x.dtype == self.weight.dtype:
            y: Tensor = torch.mm(x, self.weight.T, out_dtype=torch.float32)
        else:
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            y = x.to(wide) @ self.weight.to(wide).T
        return y if self.bias is None else y + self.bias.to(y.dtype)


# --- the closed form ----------------------------------------------------------------------------


# λ that `auto` chooses from: half-decades. Smaller values gain nothing.
RIDGES: tuple[float, ...] = tuple(10.0 ** (exponent / 2) for exponent in range(-10, 3))
RIDGE_STEP = math.sqrt(10.0)
LARGEST_ROUNDING = 0.01  # a λ above this is never needed because of rounding errors
FIRST_GUESS = 0.003


class Factor:
    """The factorised G + λ mean(diag G) I, for every map with these inputs.

    Sums of bf16 products leave errors of 1e-7 of G's largest eigenvalue. If the inputs have few
    distinct values, G then has negative eigenvalues of up to 1e-4 of its mean diagonal. A λ below
    that level would fit the rounding errors, so `ridge` is raised above it: by half-decades until G
    can be factorised, and once more to be clear of it.
    """

    def __init__(self, gram: Tensor, ridge: float) -> None:
        self.ridge = ridge
        mean = float(gram.diagonal().mean())
        self._lower: Tensor | None = None
        if mean == 0.0:
            return  # no token, or inputs of zeros: the update is zero
        lower = _cholesky(gram, ridge * mean)
        if lower is None:
            while lower is None and self.ridge < LARGEST_ROUNDING:
                self.ridge *= RIDGE_STEP
                lower = _cholesky(gram, self.ridge * mean)
            self.ridge *= RIDGE_STEP
            lower = _cholesky(gram, self.ridge * mean)
        if lower is None:
            raise NumericalError(
                f"the Gram matrix of {gram.shape[0]} inputs cannot be factored at any ridge from "
                f"{ridge:g} to {self.ridge:g}",
                hint="the sums are not finite, or the checkpoint is damaged",
            )
        self._lower = lower

    def update(self, cross: Tensor) -> Tensor:
        """Return Δ = C (G + λ mean(diag G) I)⁻¹, (out, in) float64."""
        if self._lower is None:
            return torch.zeros_like(cross)
        return torch.cholesky_solve(cross.T, self._lower).T


def _cholesky(gram: Tensor, damping: float) -> Tensor | None:
    """Return the lower Cholesky factor of G + damping I, or None if it is not positive definite."""
    damped = gram.clone()
    damped.diagonal().add_(damping)
    lower, info = torch.linalg.cholesky_ex(damped)
    # Some LAPACK builds factorise NaN without a word.
    works = (info == 0) & torch.isfinite(lower.diagonal()).all()
    return lower if bool(works) else None


def choose_ridge(
    problems: Sequence[tuple[FitSums, FitSums]],
    start: float = FIRST_GUESS,
    added_up: Callable[[float], float] = float,
) -> float:
    """Return the λ with the least total error on held-out tokens; of equals, the largest.

    `problems` are (calibration, held-out) sums of maps of one kind. `added_up` adds the errors of
    other ranks.
    """

    def error(ridge: float) -> tuple[float, float]:
        own = (held.error(Factor(sums.gram, ridge).update(sums.cross)) for sums, held in problems)
        return added_up(sum(own)), -ridge

    return lowest(RIDGES, start, error)[0]


@dataclass
class RidgeRule:
    """The λ of every map: `fixed`, or chosen on held-out tokens if that is None.

    Layers are similar, so a search starts where the last one for a map of that kind ended. Most end
    there, after three factorisations instead of up to a dozen.
    """

    fixed: float | None = None
    last: dict[str, float] = field(default_factory=dict)  # by kind of map

    def choose(
        self,
        kind: str,
        problems: Sequence[tuple[FitSums, FitSums]],
        added_up: Callable[[float], float] = float,
    ) -> float:
        """Choose λ for maps of one kind that share it; see `choose_ridge`."""
        if self.fixed is not None:
            return self.fixed
        start = self.last.get(kind, FIRST_GUESS)
        self.last[kind] = choose_ridge(problems, start, added_up)
        return self.last[kind]


# Rounds a weight to a quantised format; returns the format and the rounding error, too.
Quantise = Callable[[Tensor], tuple[Tensor, str, Rounding]]


@dataclass(frozen=True)
class QuantisedFit:
    """The cost of rounding a map to a quantised format."""

    format: str
    error: float  # Σ(w − ŵ)² of the weight
    unrounded: float  # the map's error before rounding, on held-out tokens if there are any


@dataclass(frozen=True)
class Fit:
    """The figures of a map's new weight. Errors are Σ s² ‖r − Δ x‖² of the stored weight."""

    ridge: float
    inputs: int  # of the map; fewer tokens than these cannot determine it
    tokens: int
    before: float  # on the calibration tokens, with the merged weight
    after: float
    held_tokens: int
    held_before: float | None  # on held-out tokens; None: there are none
    held_after: float | None
    kept: bool  # the merged weight is kept, since held-out tokens would have lost
    quantised: QuantisedFit | None = None


def fit_map(
    merged: Tensor,
    sums: FitSums,
    held: FitSums,
    factor: Factor,
    stored: torch.dtype,
    *,
    keep: bool = True,
    quantise: Quantise | None = None,
) -> tuple[Tensor, Fit]:
    """Solve, and round to the `stored` dtype; keep the merged weight if held-out tokens lose.

    `merged` is (out, in). Without held-out tokens, the calibration tokens must not lose, since
    rounding can cancel a small update. Without `keep`, the caller decides. With `quantise`, the
    weight is also rounded to that format.
    """
    old = merged.double()
    weight = (old + factor.update(sums.cross)).to(stored)
    if not bool(torch.isfinite(weight).all()):
        raise NumericalError(
            f"the new weight does not fit into {stored}: it holds non-finite values",
            hint="use a larger `ridge`, or give more text",
        )
    quantised = None
    if quantise is not None:
        unrounded = (held if held.tokens else sums).error(weight.double() - old)
        weight, name, rounding = quantise(weight)
        quantised = QuantisedFit(name, rounding.error, unrounded)
    step = weight.double() - old
    before, after = float(sums.energy), sums.error(step)
    held_before = held_after = None
    if held.tokens:
        held_before, held_after = float(held.energy), held.error(step)
        kept = held_after >= held_before
    else:
        kept = after > before
    kept = kept and keep
    if kept:
        weight, after, held_after, quantised = merged.to(stored), before, held_before, None
    return weight, Fit(
        ridge=factor.ridge,
        inputs=merged.shape[1],
        tokens=sums.tokens,
        before=before,
        after=after,
        held_tokens=held.tokens,
        held_before=held_before,
        held_after=held_after,
        kept=kept,
        quantised=quantised,
    )
