"""Targets of a layer's maps, and how its modules write to the hidden state.

Most maps should produce the output of the source's map on the source's own input. A map that writes
to the hidden state should bring it to the source's hidden state, so that each layer also corrects
the residual of the layers before it.

A layer h → h' is a sum: h' = h + Σ_j a_j o_j, with o_j the outputs of the last maps of attention
and experts. a_j is 1 in most families, and a constant of the config in some (a residual multiplier,
a scale of routed experts). For a shared expert it may be the sigmoid of a map with one output.
Least squares on one batch finds the a_j. If the sum does not match (a norm between a map and the
hidden state, for example), no map of the layer writes to the hidden state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moemerge.repairs.refitting.least_squares import Affine
from moemerge.repairs.refitting.records import BatchId, Record
from moemerge.runtime.ranks import Ranks
from moemerge.text.batches import Batch

# Units in the last place that rounding of the hidden state may amount to.
ULPS = 4.0
# Share of the layer's change that may remain unexplained beyond rounding (root mean square).
MISSED = 1e-4
# Tokens that are used.
PROBED = 2048
# A module that contributes less than this share of the change does not write to the state.
NOTHING = 1e-3
# A coefficient this near to 1 is 1.
SNAP = 5e-3


@dataclass(frozen=True)
class ResidualWrite:
    """A module adds `factor` times its output, or that times the sigmoid of `gate`'s output."""

    path: str
    factor: float
    gate: str | None = None


def find_writes(
    entered: Tensor,
    left: Tensor,
    outputs: Mapping[str, Tensor],
    gates: Mapping[str, Tensor],
) -> tuple[ResidualWrite, ...] | None:
    """Return the writes in the order of `outputs`, or None if the layer is not such a sum.

    All tensors are (tokens, d), except `gates`, which are (tokens, 1).
    """
    entered, left = entered[:PROBED], left[:PROBED]
    outputs = {path: out[:PROBED] for path, out in outputs.items()}
    gates = {path: z[:PROBED] for path, z in gates.items()}
    columns: list[tuple[str, str | None, Tensor]] = []
    for path, out in outputs.items():
        if out.shape != left.shape:
            continue
        columns.append((path, None, out))
        columns += [(path, gate, torch.sigmoid(z.float()) * out) for gate, z in gates.items()]
    change = left.double() - entered.double()
    size = change.square().mean().sqrt()
    if not columns or entered.shape != left.shape or float(size) == 0.0:
        return None
    if not all(bool(t.isfinite().all()) for t in (change, *(column for _, _, column in columns))):
        return None  # some LAPACKs raise an internal error for NaN
    eps = torch.finfo(left.dtype).eps
    largest = torch.maximum(entered.abs(), left.abs()).double()
    noise = ULPS * eps * (largest + size) + MISSED * size
    weighted = change / noise
    while True:
        factors = _solve([column / noise for _, _, column in columns], weighted)
        shares = [
            abs(f) * float((column.double() / noise).norm()) / float(weighted.norm())
            for f, (_, _, column) in zip(factors, columns, strict=True)
        ]
        kept = [at for at, share in enumerate(shares) if share > NOTHING]
        if len(kept) == len(columns):
            break
        if not kept:
            return None
        columns = [columns[at] for at in kept]
    factors = [1.0 if abs(f - 1.0) < SNAP else f for f in factors]
    rest = change - sum(
        f * column.double() for f, (_, _, column) in zip(factors, columns, strict=True)
    )
    paths = [path for path, _, _ in columns]
    if float((rest / noise).square().mean()) > 1.0 or len(set(paths)) != len(paths):
        return None
    return tuple(
        ResidualWrite(path, factor, gate)
        for factor, (path, gate, _) in zip(factors, columns, strict=True)
    )


def _solve(columns: Sequence[Tensor], wanted: Tensor) -> list[float]:
    """Solve least squares with a few unknowns by the normal equations."""
    flat = torch.stack([column.double().reshape(-1) for column in columns])  # (unknowns, n)
    gram = flat @ flat.T
    right = flat @ wanted.reshape(-1)
    solution: list[float] = (
        torch.linalg.lstsq(gram.cpu(), right.cpu()[:, None]).solution[:, 0].tolist()
    )
    return solution


# --- the hidden state inside a layer --------------------------------------------------------------


@dataclass
class LayerView:
    """One model in one layer: its modules, and the records of each batch so far."""

    model: nn.Module
    records: Mapping[BatchId, Record]

    def record(self, batch: Batch) -> Record:
        return self.records[id(batch)]


@dataclass(frozen=True)
class LayerStructure:
    """How a layer's modules write to the hidden state: h + Σ a_j o_j over the writes so far."""

    writes: Sequence[ResidualWrite] = ()  # all of the layer, in order
    # A gate's path -> a module that reads the same input before it.
    leaders: Mapping[str, str] = field(default_factory=dict)
    called: frozenset[str] = frozenset()  # modules that the layer runs

    def place(self, path: str) -> int | None:
        """Return the index of a module's write, or None if it writes elsewhere."""
        return next((at for at, write in enumerate(self.writes) if write.path == path), None)

    def after(self, view: LayerView, batch: Batch, count: int, rows: slice) -> Tensor:
        """Return the state after the first `count` writes, (tokens, d) in float32 at least;
        read-only."""
        record = view.record(batch)
        if count == len(self.writes) and record.left is not None:
            return _wide(record.left[rows])
        assert record.entered is not None
        state = _wide(record.entered[rows]).clone()
        for write in self.writes[:count]:
            written = _wide(record.outputs[write.path][rows])
            state += self.coefficient(view, batch, write, rows) * written
        return state

    def rounding(
        self, view: LayerView, batch: Batch, place: int, rows: slice, output: Tensor
    ) -> Tensor:
        """Bound the rounding difference between a source's state and this model's after write
        `place`.

        `output` (tokens, d) is what the write adds. The section on rounding below derives the
        bound.
        """
        record = view.record(batch)
        assert record.entered is not None
        state = _wide(record.entered[rows]).clone()
        sums, products = state.abs(), torch.zeros_like(state)
        for write in self.writes[:place]:
            written = self.coefficient(view, batch, write, rows) * _wide(
                record.outputs[write.path][rows]
            )
            state += written
            sums += state.abs()
            products += written.abs() * roundings_of(write)
        sums += (state + output).abs()
        own = 2.0 * unit(state.dtype) * sums
        if place + 1 < len(self.writes):
            return own  # computed here, not by the model
        products += output.abs() * roundings_of(self.writes[place])
        return own.add_(sums.add_(products), alpha=unit(record.entered.dtype))

    def coefficient(
        self, view: LayerView, batch: Batch, write: ResidualWrite, rows: slice
    ) -> Tensor | float:
        """Return a_j of every token: a number, or (tokens, 1)."""
        if write.gate is None:
            return write.factor
        x = view.record(batch).inputs[self.leaders[write.gate]][rows]
        gate = Affine.of(view.model, f"{write.gate}.weight").widened()
        return write.factor * torch.sigmoid(gate(x))


def roundings_of(write: ResidualWrite) -> float:
    """Return how often a module's output is rounded before it is added to the hidden state."""
    return OWN_ROUNDINGS if write.gate is None else GATED_ROUNDINGS


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# --- rounding -----------------------------------------------------------------------------------
#
# Even if a source equals the merged model, h_source − h_merged is not zero: the forward pass rounds
# every product and every sum to its dtype, and the fit computes a map's output again in float32.
# Rounding errors depend on the inputs, so a fit would find structure in them, on held-out rows too.
# So each residual is compared with a bound on rounding first. With u half a unit in the last place
# of the forward's dtype, and h_j the state after the j-th write a_j o_j of the layer:
#
# * A state that the model computed was rounded at every sum, by u |h_j|, and at every product
#   a_j o_j (and o_j itself), by u |a_j o_j| each. A state summed here has float32 rounding only.
# * A map's output was rounded once, and its product with a factor once more.
# * The outputs of k experts are weighted and added in the forward's dtype, by both models, and in
#   another order if batches are padded: 2 · 3k roundings. The bound is six standard deviations
#   (each u / √3).
# * A product of n terms is off by √n roundings of its running sum, estimated by the token's mean
#   output, in both models.
#
# If no value of a domain exceeds the bound, the domain already matches. If one does, all residuals
# count unchanged.
# Tokens that are compared at a time. If a domain differs, the first block usually shows it.
COMPARED_TOKENS = 1024
DEVIATIONS = 6.0
OWN_ROUNDINGS = 2.0  # a map's output, and its product with a factor
# Of a shared expert weighed by a gate: the gate's own output, its sigmoid, and the product.
GATED_ROUNDINGS = 8.0


def unit(dtype: torch.dtype) -> float:
    """Return u of a dtype: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def of_output(output: Tensor, dtype: torch.dtype, terms: int, roundings: float) -> Tensor:
    """Bound the error of a map's output (tokens, d) after this many roundings to `dtype`."""
    typical = output.square().mean(dim=1, keepdim=True).sqrt()
    share = roundings * unit(dtype) + 4.0 * math.sqrt(terms) * unit(output.dtype)
    return (output.abs() + typical) * share


def of_experts(chosen: int) -> float:
    """Return the effective number of roundings of the summed output of `chosen` experts."""
    return DEVIATIONS * math.sqrt(2.0 * chosen)


# rows -> their residuals, and the bound on rounding, (tokens, d)
Compared = Callable[[slice], tuple[Tensor, Tensor]]


class RoundingCheck:
    """Finds the domains whose residuals are all within rounding error."""

    def __init__(self, domains: Iterable[str]) -> None:
        self._domains = tuple(domains)
        self._differing: set[str] = set()

    def compare(self, batch: Batch, compared: Compared) -> None:
        """Compare the rows of a batch with the bound, until one shows that the domain differs."""
        for begin in range(0, batch.tokens, COMPARED_TOKENS):
            if batch.domain in self._differing:
                return
            residual, bound = compared(slice(begin, min(begin + COMPARED_TOKENS, batch.tokens)))
            if not bool((residual.abs() <= bound).all()):
                self._differing.add(batch.domain)

    def matching(self, ranks: Ranks) -> frozenset[str]:
        """Return the domains that match, over all ranks and compared batches."""
        return frozenset(d for d in self._domains if ranks.all_agree(d not in self._differing))
