"""The closed form: a map's new weight from its sums, and how far to go.

min_Δ Σ_t s_t² ‖r_t − Δ x_t‖² + λ mean(diag G) ‖Δ‖²  ⇒  Δ = C (G + λ mean(diag G) I)⁻¹,
with W = W_merged + Δ. λ counts in units of the inputs' mean square, so it means the same for every
map; at λ → ∞ the map stays as merged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.refitting.sums import FitSums

# λ that `auto` chooses from: half-decades. Below the least of them nothing is gained any more, and
# float64 factors what rounding leaves of G at all of them.
RIDGES: tuple[float, ...] = tuple(10.0 ** (exponent / 2) for exponent in range(-10, 3))
FIRST_GUESS = 0.003


class Factor:
    """(G + λ mean(diag G) I) factored, for every map that reads these inputs."""

    def __init__(self, gram: Tensor, ridge: float) -> None:
        self.ridge = ridge
        mean = float(gram.diagonal().mean())
        self._lower: Tensor | None = None
        if mean == 0.0:
            return  # no token, or inputs of zeros: nothing can be learnt, so nothing moves
        damped = gram.clone()
        damped.diagonal().add_(ridge * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) != 0:
            raise NumericalError(
                f"the Gram matrix of {gram.shape[0]} inputs cannot be factored at ridge {ridge:g}",
                hint="the inputs hardly vary: use a larger `ridge`",
            )
        self._lower = lower

    def update(self, cross: Tensor) -> Tensor:
        """Δ = C (G + λ mean(diag G) I)⁻¹, (out, in) float64."""
        if self._lower is None:
            return torch.zeros_like(cross)
        return torch.cholesky_solve(cross.T, self._lower).T


@dataclass(frozen=True)
class RidgeChoice:
    """A ridge chosen from held-out tokens."""

    ridge: float
    errors: dict[float, float]  # λ tried -> summed error on held-out tokens


def choose_ridge(
    problems: Sequence[tuple[FitSums, FitSums]],
    ridges: Sequence[float] = RIDGES,
    start: float = FIRST_GUESS,
    added_up: Callable[[float], float] = float,
) -> RidgeChoice:
    """The λ whose fits, all taken together, have the least error on held-out tokens.

    `problems` are (calibration, held out) sums of maps of one kind. From `start` the search walks
    downhill over `ridges`: the error has one valley, and every step costs a factorisation.
    `added_up` adds what other ranks find for problems of their own.
    """
    errors: dict[float, float] = {}

    def error(ridge: float) -> float:
        if ridge not in errors:
            own = (
                held.error(Factor(sums.gram, ridge).update(sums.cross)) for sums, held in problems
            )
            errors[ridge] = added_up(sum(own))
        return errors[ridge]

    at = min(range(len(ridges)), key=lambda i: abs(ridges[i] - start))
    at = _downhill(at, lambda i: error(ridges[i]), len(ridges))
    return RidgeChoice(ridges[at], errors)


def _downhill(at: int, value: Callable[[int], float], count: int) -> int:
    """The foot of the valley that `at` lies in; of equals, the one more to the right."""
    for step in (1, -1):
        moved = False
        while 0 <= at + step < count and (
            value(at + step) < value(at) or (step > 0 and value(at + step) == value(at))
        ):
            at, moved = at + step, True
        if moved:
            break
    return at


@dataclass
class RidgeRule:
    """λ of every map: `fixed`, or (None) what held-out tokens choose.

    Layers are much alike, so a search begins where the last one for a map of that kind ended: most
    end there, after three factorisations instead of up to a dozen.
    """

    fixed: float | None = None
    last: dict[str, float] = field(default_factory=dict)  # by kind of map

    def choose(
        self,
        kind: str,
        problems: Sequence[tuple[FitSums, FitSums]],
        added_up: Callable[[float], float] = float,
    ) -> float:
        """For maps of one kind that share their λ; see `choose_ridge`."""
        if self.fixed is not None:
            return self.fixed
        start = self.last.get(kind, FIRST_GUESS)
        self.last[kind] = choose_ridge(problems, start=start, added_up=added_up).ridge
        return self.last[kind]


@dataclass(frozen=True)
class Fit:
    """What a map's new weight is worth. Errors are Σ s² ‖r − Δ x‖², of the weight as stored."""

    ridge: float
    inputs: int  # of the map; fewer tokens than these cannot determine it
    tokens: int
    before: float  # on the calibration tokens, as merged
    after: float
    held_tokens: int
    held_before: float | None  # on held-out tokens; None: there are none
    held_after: float | None
    kept: bool  # it stays as merged, since held-out tokens would have lost


def fit_map(
    merged: Tensor,
    sums: FitSums,
    held: FitSums,
    factor: Factor,
    stored: torch.dtype,
    *,
    keep: bool = True,
) -> tuple[Tensor, Fit]:
    """Solve and round to the `stored` dtype; what loses on held-out tokens stays as merged.

    `merged` is (out, in). Without held-out tokens the calibration's own must at least not lose,
    as rounding may eat a small move. Without `keep` the caller decides.
    """
    old = merged.double()
    weight = (old + factor.update(sums.cross)).to(stored)
    if not bool(torch.isfinite(weight).all()):
        raise NumericalError(
            f"the new weight does not fit into {stored}: it holds non-finite values",
            hint="use a larger `ridge`, or give more text",
        )
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
        weight, after, held_after = merged.to(stored), before, held_before
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
    )
