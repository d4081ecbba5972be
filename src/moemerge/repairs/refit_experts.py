"""Refit all experts of a layer: their first projections, then their last.

A token counts for the experts that the merged router selects, weighted by the square of its routing
weight, since an expert's error changes the hidden state by that much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moemerge.errors import NumericalError
from moemerge.forward.input_hooks import ExpertsHook, ExpertView
from moemerge.forward.tokens import sort_by_expert
from moemerge.repairs.experts import ExpertMap
from moemerge.repairs.least_squares import (
    Affine,
    Factor,
    Fit,
    FitSums,
    RidgeRule,
    concatenated,
    fit_map,
)
from moemerge.repairs.refit_maps import Storage
from moemerge.repairs.refit_report import kind_of_map
from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch

# Number of experts whose held-out tokens choose λ for all experts of the layer. It is lower, but
# at least two, if their sums would take more than these bytes.
SAMPLED, SAMPLED_BYTES = 8, 2**29
# Values of one block of outputs.
BLOCK_VALUES = {"cpu": 2**23, "cuda": 2**27}
# Lower bound of a token's summed routing weights, so that a share is never 0 / 0.
SMALLEST_TOTAL = 1e-12
DomainKey = tuple[str, bool]  # a domain, and whether its rows are held out


@dataclass(frozen=True)
class RoutedBatch:
    """One batch, and the experts that its tokens are routed to."""

    batch: Batch
    x: Tensor  # (tokens, d)
    chosen: Tensor  # (tokens, k)
    weights: Tensor  # (tokens, k)

    def total(self) -> Tensor:
        """Return the sum of each token's routing weights, (tokens, 1), in float32 at least."""
        wide = self.weights if self.weights.dtype == torch.float64 else self.weights.float()
        return wide.sum(dim=1, keepdim=True).clamp_min(SMALLEST_TOTAL)


@dataclass(frozen=True)
class RoutedDomain:
    """The concatenated batches of one domain, either calibration or held-out.

    Pairs of token and expert are sorted by expert. So the tokens of an expert are read and summed
    at once: a batch has few of them, and every sum is a pass over matrices of the map's size.
    """

    batches: tuple[Batch, ...]
    x: Tensor  # (tokens, d)
    weights: Tensor  # (tokens, k)
    order: Tensor  # (pairs,) places in the flattened choices
    bounds: Sequence[int]  # of each expert, in `order`

    @classmethod
    def of(cls, routed: Sequence[RoutedBatch], experts: int) -> RoutedDomain:
        order, bounds = sort_by_expert(concatenated([r.chosen for r in routed]), experts)
        x, weights = concatenated([r.x for r in routed]), concatenated([r.weights for r in routed])
        return cls(tuple(r.batch for r in routed), x, weights, order, bounds)

    @property
    def key(self) -> DomainKey:
        return self.batches[0].domain, self.batches[0].holdout

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return an expert's tokens (n,), and their routing weights (n, 1) in float32 at least."""
        places = self.order[self.bounds[expert] : self.bounds[expert + 1]]
        weights = self.weights.reshape(-1).index_select(0, places)
        wide = weights if weights.dtype == torch.float64 else weights.float()
        return places // self.weights.shape[1], wide[:, None]


def blocks(tokens: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield rows whose outputs, `width` for each, are computed at once."""
    size = max(1, BLOCK_VALUES.get(device.type, BLOCK_VALUES["cpu"]) // max(1, width))
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


def by_domain(routed: Sequence[RoutedBatch], experts: int) -> list[RoutedDomain]:
    """Concatenate the batches of every domain, held-out ones separately, in the order given."""
    groups: dict[DomainKey, list[RoutedBatch]] = {}
    for one in routed:
        groups.setdefault((one.batch.domain, one.batch.holdout), []).append(one)
    return [RoutedDomain.of(own, experts) for own in groups.values()]


class ExpertStack:
    """The experts of one layer of one model, each matrix as (out, in).

    Those of a source with more experts are numbered as the merged model's, by a map.
    """

    def __init__(self, module: Any, hook: ExpertsHook, experts: ExpertMap | None = None) -> None:
        self.module = module
        self.hook = hook
        self.experts = experts
        self.names = {"up": hook.up.rpartition(".")[2], "down": hook.down.rpartition(".")[2]}

    def affine(self, which: str, expert: int) -> Affine:
        bias = None
        if self.module.has_bias:
            bias = getattr(self.module, f"{self.names[which]}_bias")[expert].detach()
        return Affine(self.weight(which, expert), bias)

    def weight(self, which: str, expert: int) -> Tensor:
        weight: Tensor = getattr(self.module, self.names[which])[expert].detach()
        return weight.T if self.module.is_transposed else weight

    def behind(self, expert: int) -> int | None:
        """Return the number of an expert in this model; None if it stands for several."""
        return expert if self.experts is None else self.experts.behind(expert)

    def put(self, which: str, expert: int, weight: Tensor) -> None:
        with torch.no_grad():
            self.weight(which, expert).copy_(weight)

    def inner(self, expert: int, x: Tensor) -> Tensor:
        """Return the input of the last projection, (n, inner)."""
        view = ExpertView(self.module, expert)
        return view.mid(view.pre(x))


@dataclass(frozen=True)
class ExpertRows:
    """Some tokens of one expert, as inputs and residuals of one of its projections."""

    x: Tensor  # (n, in)
    missing: Tensor  # (n, out)
    root: Tensor  # √c, (n, 1)
    factor: Tensor | float = 1.0  # of x, (n, 1) or one for all


# (routing, expert) -> blocks of the expert's tokens
Problem = Callable[[RoutedDomain, int], Iterator[ExpertRows]]


def fit_projection(
    stack: ExpertStack,
    which: str,
    routings: Sequence[RoutedDomain],
    problem: Problem,
    *,
    scales: Mapping[DomainKey, float],
    rule: RidgeRule,
    storage: Storage,
    ranks: Ranks,
) -> list[Fit]:
    """Fit a projection of all experts, `up` (with gate) or `down`, and store the weights.

    `scales` are √(ω_i / N_i) of every domain. Experts do not read each other's outputs, so their
    order does not matter. They are assigned to ranks round-robin.
    """
    device, count = routings[0].x.device, stack.hook.count
    name = str(getattr(stack.hook, which))
    units = storage.experts(stack.hook, stack.module)

    def sums_of(expert: int) -> tuple[FitSums, FitSums]:
        outputs, inputs = stack.weight(which, expert).shape
        sums = FitSums.empty(outputs, inputs, device), FitSums.empty(outputs, inputs, device)
        for routing in routings:
            for rows in problem(routing, expert):
                scale = rows.root * scales[routing.key]
                sums[routing.key[1]].add(rows.x, rows.missing, scale, factor=rows.factor)
        for one in sums:
            one.add_up(ranks, expert % ranks.count)
        return sums

    ready: dict[int, tuple[FitSums, FitSums]] = {}
    if rule.fixed is None:
        sampled = _sample(routings, count, stack.weight(which, 0).shape, ranks)
        ready = {expert: sums_of(expert) for expert in sampled}
    own = [sums for expert, sums in ready.items() if expert % ranks.count == ranks.rank]
    # Maps of one kind have much the same λ.
    ridge = rule.choose(kind_of_map(name), own, partial(ranks.sum_of, device=device))
    fits: dict[int, Fit] = {}
    for expert in range(count):
        sums = ready.pop(expert, None) or sums_of(expert)
        if expert % ranks.count != ranks.rank:
            continue
        try:
            weight, fits[expert] = fit_map(
                stack.weight(which, expert),
                *sums,
                Factor(sums[0].gram, ridge),
                storage.dtype(name),
                quantise=storage.quantise(units[which, expert]),
            )
        except NumericalError as error:
            where = f"expert {expert}, {which}: {error.message}"
            raise NumericalError(where, hint=error.hint) from error
        stack.put(which, expert, weight)
    if ranks.count > 1:  # exchange weights and fits
        for expert in range(count):
            weight = stack.weight(which, expert).contiguous()
            ranks.broadcast(expert % ranks.count, weight)
            stack.put(which, expert, weight)
        fits = {expert: fit for own_fits in ranks.gather(fits) for expert, fit in own_fits.items()}
    return [fits[expert] for expert in range(count)]


def sample_size(shape: Sequence[int]) -> int:
    """Return how many experts choose λ, for maps of this shape (out, in)."""
    inputs = shape[1]
    nbytes = 2 * torch.float64.itemsize * (inputs + shape[0]) * inputs
    return max(2, min(SAMPLED, SAMPLED_BYTES // max(1, nbytes)))  # a config may contain 0


def _sample(
    routings: Sequence[RoutedDomain], count: int, shape: Sequence[int], ranks: Ranks
) -> list[int]:
    """Return experts whose token counts are spread evenly, in ascending order."""
    own = [sum(r.bounds[e + 1] - r.bounds[e] for r in routings) for e in range(count)]
    tokens = ranks.totals(own, routings[0].x.device)
    ranked = sorted(range(count), key=lambda expert: (tokens[expert], expert))
    size = min(sample_size(shape), count)
    return sorted({ranked[(2 * at + 1) * count // (2 * size)] for at in range(size)})


def own_projection(
    stack: ExpertStack,
    which: str,
    source: Callable[[DomainKey], tuple[ExpertStack, Tensor]],
) -> Problem:
    """Fit a projection, "up" (with gate) or "down", to the source expert's output on its own state.

    `source` returns the experts of a domain's source and the states that they read, (tokens, d). An
    expert that stands for several of the source keeps its projection: it has no counterpart.
    """

    def problem(routing: RoutedDomain, expert: int) -> Iterator[ExpertRows]:
        theirs, states = source(routing.key)
        counterpart = theirs.behind(expert)
        if counterpart is None:
            return
        wanted = theirs.affine(which, counterpart).widened()
        now = stack.affine(which, expert).widened()
        tokens, roots = routing.of_expert(expert)
        for rows in blocks(len(tokens), max(now.weight.shape), tokens.device):
            x = routing.x.index_select(0, tokens[rows])
            state = states.index_select(0, tokens[rows])
            if which == "down":
                x, state = stack.inner(expert, x), theirs.inner(counterpart, state)
            yield ExpertRows(x, wanted(state) - now(x), roots[rows])

    return problem


def last_projection(
    stack: ExpertStack,
    shares: Mapping[DomainKey, Tensor],
    factor: Mapping[DomainKey, Tensor | float],
) -> Problem:
    """Fit down to its share of the residual of the hidden state after the layer.

    The expert adds `factor` · w · Δ inner to the hidden state and should add w / Σw of the
    residual. So inputs are scaled by both, and the share is divided by w, which is the weight of
    the token. That leaves `shares` (tokens, d), the residual / Σw, which is the same for all
    experts of a token.
    """

    def problem(routing: RoutedDomain, expert: int) -> Iterator[ExpertRows]:
        share, scale = shares[routing.key], factor[routing.key]
        tokens, roots = routing.of_expert(expert)
        width = max(stack.weight("down", expert).shape)
        for rows in blocks(len(tokens), width, tokens.device):
            places = tokens[rows]
            inner = stack.inner(expert, routing.x.index_select(0, places))
            by = scale.index_select(0, places) if isinstance(scale, Tensor) else scale
            yield ExpertRows(inner, share.index_select(0, places), roots[rows], by)

    return problem
