"""Activations inside a layer, and how its modules write to the hidden state.

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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moemerge.errors import ArchitectureError
from moemerge.forward.stops import Call, Rerun
from moemerge.forward.stream import ModelStream
from moemerge.forward.tokens import real_tokens
from moemerge.repairs.least_squares import Affine
from moemerge.repairs.refit_maps import LayerMaps
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


# --- activations ----------------------------------------------------------------------------------


@dataclass
class Record:
    """Activations of one batch in one layer: rows of real tokens, by module path."""

    entered: Tensor | None = None  # the hidden state before the layer, (tokens, d)
    left: Tensor | None = None  # and after it
    inputs: dict[str, Tensor] = field(default_factory=dict)  # (tokens, in); shared where they are
    outputs: dict[str, Tensor] = field(default_factory=dict)  # (tokens, out)
    order: list[str] = field(default_factory=list)  # paths as they were called


@dataclass(frozen=True)
class Structure:
    """How a layer's modules write to the hidden state, found in the first batch of a source."""

    writes: Sequence[ResidualWrite] = ()  # all of the layer, in order
    # A gate's path -> a module that reads the same input before it.
    leaders: Mapping[str, str] = field(default_factory=dict)
    called: frozenset[str] = frozenset()  # modules that the layer runs

    @classmethod
    def of(cls, maps: LayerMaps, record: Record) -> Structure:
        writers, gates = set(maps.writers), set(maps.gates)
        outputs = {
            p: record.outputs[p] for p in record.order if p in writers & record.outputs.keys()
        }
        scales = {p: record.outputs[p] for p in record.order if p in gates & record.outputs.keys()}
        called = frozenset(record.order)
        if record.entered is None or record.left is None:
            return cls(called=called)
        writes = find_writes(record.entered, record.left, outputs, scales) or ()
        leaders: dict[str, str] = {}
        for write in writes:
            if write.gate is None:
                continue
            read = record.inputs.get(write.gate)
            before = record.order[: record.order.index(write.path) + 1]
            same = (p for p in before if read is not None and record.inputs.get(p) is read)
            if (leader := next(same, None)) is None:
                return cls(called=called)
            leaders[write.gate] = leader
        return cls(tuple(writes), leaders, called)

    def place(self, path: str) -> int | None:
        """Return the index of a module's write, or None if it writes elsewhere."""
        return next((at for at, write in enumerate(self.writes) if write.path == path), None)


class Activations:
    """What the models computed in one layer, of the merged model and of each batch's source.

    Sources run the layer first. Their first batch shows its structure, which decides what the
    others record, and what the merged model does.
    """

    def __init__(self, streams: Mapping[str, ModelStream], ranks: Ranks) -> None:
        """Attach to the merged model, with the name "", and to the source of each domain."""
        self.streams = streams
        self.ranks = ranks
        self.maps: LayerMaps | None = None
        self.structure = Structure()
        self.merged: dict[int, Record] = {}  # by id of the batch
        self.sources: dict[int, Record] = {}
        self._learnt = False
        for name, stream in self.streams.items():
            hooks = [hook.path for hooks in stream.input_hooks.layers for hook in hooks]
            # A router may be a module around its linear map, which then has no input hook.
            routers = [router.path for router in stream.anatomy.routers]
            heard = dict.fromkeys([*stream.anatomy.layers, *hooks, *routers])
            stream.listen(heard, partial(self._record, name), outputs=True)

    def begin(self, maps: LayerMaps | None, entered: Mapping[int, Tensor]) -> None:
        """Drop the previous layer. Without `maps`, only states before and after are recorded."""
        self.maps, self.structure, self._learnt = maps, Structure(), False
        self.sources = {}
        self.merged = {key: Record(entered=tokens) for key, tokens in entered.items()}

    def model(self, batch: Batch) -> nn.Module:
        """Return the source of a batch."""
        return self.streams[batch.domain].model

    def source(self, batch: Batch) -> Record:
        return self.sources[id(batch)]

    # --- recording ---

    def _record(self, name: str, batch: Batch, rows: Tensor | None, calls: Sequence[Call]) -> None:
        calls = [call for call in calls if call.out is not None]
        if not calls:
            return
        stream = self.streams[name]
        # Activations of a waiting batch may be offloaded, so they are copied.
        copies = stream.settings.offload in ("disk", "cpu") and rows is None
        record = (self.sources if name else self.merged).setdefault(id(batch), Record())
        known: dict[int, Tensor | None] = {}  # tensors that several modules read are stored once

        def tokens(value: Any) -> Tensor | None:
            if not isinstance(value, Tensor):
                return None
            if id(value) not in known:
                own = real_tokens(value, batch, rows)
                if own is None or own.shape[0] != batch.tokens:
                    return None
                known[id(value)] = own.detach().clone() if copies else own.detach()
            return known[id(value)]

        for call in calls:
            given = next(iter((*call.args, *call.kwargs.values())), None)
            out = call.out[0] if isinstance(call.out, tuple) else call.out
            if call.path in stream.anatomy.layers:
                if record.entered is None:
                    record.entered = tokens(given)
                record.left = tokens(out)
                continue
            record.order.append(call.path)
            if self._needs_input(call.path, name) and (x := tokens(given)) is not None:
                record.inputs[call.path] = x
            if self._needs_output(call.path, name) and (x := tokens(out)) is not None:
                record.outputs[call.path] = x
        if name and self.maps is not None and not self._learnt and record.left is not None:
            # The factors come from one batch: rank 0's.
            self.structure = self.ranks.broadcast_object(Structure.of(self.maps, record))
            self._learnt = True
            record.inputs = {p: x for p, x in record.inputs.items() if self._needs_input(p, name)}
            record.outputs = {
                p: x for p, x in record.outputs.items() if self._needs_output(p, name)
            }

    def _needs_input(self, path: str, source: str) -> bool:
        maps, structure = self.maps, self.structure
        if maps is None:
            return False
        leads = path in structure.leaders.values()
        if not source:
            return leads
        if path in maps.experts or path in maps.routers or leads:
            return True
        if not self._learnt:
            return path in maps.linear or path in maps.gates or path in maps.writers
        return path in maps.linear and structure.place(path) is None

    def _needs_output(self, path: str, source: str) -> bool:
        if self.maps is None:
            return False
        if not self._learnt:
            return bool(source) and (path in self.maps.writers or path in self.maps.gates)
        return any(write.path == path for write in self.structure.writes[:-1])

    def forget_inputs(self, path: str) -> None:
        """Release the sources' recorded inputs of a module."""
        if path not in self.structure.leaders.values():
            for record in self.sources.values():
                record.inputs.pop(path, None)

    def forget_states(self, place: int | None) -> None:
        """Release the sources' states inside the layer when only its last write is left.

        That write needs only the state after the layer.
        """
        if place is None or place + 2 < len(self.structure.writes):
            return
        for record in self.sources.values():
            if record.left is not None:
                record.entered = None
                record.outputs.clear()

    # --- the hidden state inside the layer: h + Σ a_j o_j over the writes so far ---

    def after(self, batch: Batch, count: int, rows: slice, *, source: bool) -> Tensor:
        """Return the state of the merged model or of the source after the first `count` writes,
        (tokens, d) in float32 at least; read-only."""
        record = self.source(batch) if source else self.merged[id(batch)]
        if count == len(self.structure.writes) and record.left is not None:
            return _wide(record.left[rows])
        assert record.entered is not None
        state = _wide(record.entered[rows]).clone()
        for write in self.structure.writes[:count]:
            written = _wide(record.outputs[write.path][rows])
            state += self.coefficient(batch, write, rows, source=source) * written
        return state

    def coefficient(
        self, batch: Batch, write: ResidualWrite, rows: slice, *, source: bool
    ) -> Tensor | float:
        """Return a_j of every token: a number, or (tokens, 1)."""
        if write.gate is None:
            return write.factor
        record = self.source(batch) if source else self.merged[id(batch)]
        x = record.inputs[self.structure.leaders[write.gate]][rows]
        model = self.model(batch) if source else self.streams[""].model
        gate = Affine.of(model, f"{write.gate}.weight").widened()
        return write.factor * torch.sigmoid(gate(x))

    def rounding(self, batch: Batch, place: int, rows: slice, output: Tensor) -> Tensor:
        """Bound the rounding difference between a source's state and the merged model's after write
        `place`.

        `output` (tokens, d) is what the write adds. The section on rounding below derives the
        bound.
        """
        record, writes = self.merged[id(batch)], self.structure.writes
        assert record.entered is not None
        state = _wide(record.entered[rows]).clone()
        sums, products = state.abs(), torch.zeros_like(state)
        for write in writes[:place]:
            factor = self.coefficient(batch, write, rows, source=False)
            written = factor * _wide(record.outputs[write.path][rows])
            state += written
            sums += state.abs()
            products += written.abs() * roundings_of(write)
        sums += (state + output).abs()
        own = 2.0 * unit(state.dtype) * sums
        if place + 1 < len(writes):
            return own  # computed here, not by the model
        products += output.abs() * roundings_of(writes[place])
        return own.add_(sums.add_(products), alpha=unit(record.entered.dtype))


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


# --- calls of the layer and drift ---------------------------------------------------------------
# The drift is the distance of hidden states from the sources', for the refitted model and for the
# merge. For the merge, a few batches run twice: when a layer is in memory and none of its maps has
# changed yet, it is called again on the merge's hidden states.


class LayerCalls:
    """How every batch called the current layer, and the merge's hidden states of some batches."""

    def __init__(
        self, stream: ModelStream, followed: Sequence[Batch], *, every: bool, drift: bool
    ) -> None:
        """Record the calls of all batches if `every`, or of the `followed` ones for the drift."""
        self._layers = frozenset(stream.anatomy.layers)
        self._followed = {id(batch) for batch in followed}
        self._every = every
        # Until a layer cannot be called again, unless activations may be offloaded.
        self.follows = drift and stream.settings.offload not in ("disk", "cpu")
        self._calls: dict[int, tuple[Rerun, Tensor, Tensor | None]] = {}  # by id of the batch
        self._hidden: dict[int, Tensor] = {}
        stream.listen(stream.anatomy.layers, self._on_calls)

    def _on_calls(self, batch: Batch, rows: Tensor | None, calls: Sequence[Call]) -> None:
        follows = self.follows and id(batch) in self._followed
        for call in calls:
            if call.path not in self._layers or call.out is not None:
                continue
            if not (self._every or follows):
                continue
            rerun = call.rerun()
            if rerun is not None:
                self._calls[id(batch)] = (rerun[1], rerun[0].detach(), rows)
            elif self._every:
                raise ArchitectureError(
                    f"{call.path} is called without hidden states",
                    hint='use `solver="closed-form"`',
                )
            else:
                self.follows = False

    def output(self, layer: nn.Module, batch: Batch) -> Tensor:
        """Return the layer's hidden states of real tokens, (tokens, d), with its weights now."""
        again, hidden, rows = self._calls[id(batch)]
        out = again(layer, hidden)
        out = out[0] if isinstance(out, tuple) else out
        tokens = real_tokens(out, batch, rows) if isinstance(out, Tensor) else None
        return hidden.new_empty(0) if tokens is None else tokens

    def follow(self, layer: nn.Module) -> None:
        """Call the layer, which has merged weights, on the merge's states of followed batches."""
        for key in self._followed & self._calls.keys() if self.follows else ():
            again, entered, _ = self._calls[key]
            hidden = self._hidden.get(key, entered)
            try:
                with torch.no_grad():
                    out = again(layer, hidden)
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
                self.follows = False  # layers exchange more than hidden states
                return
            out = out[0] if isinstance(out, tuple) else out
            if not isinstance(out, Tensor) or out.shape != hidden.shape:
                self.follows = False
                return
            self._hidden[key] = out.detach()

    def as_merged(self, batch: Batch, rows: Tensor | None) -> Tensor | None:
        """Return the merge's states after the layer that ran last, (tokens, d)."""
        hidden = self._hidden.get(id(batch)) if self.follows else None
        return None if hidden is None else real_tokens(hidden, batch, rows)


def followed_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Return the held-out batches; if there are none, the first of every domain."""
    held = [batch for batch in batches if batch.holdout]
    return held or list({batch.domain: batch for batch in reversed(batches)}.values())


def layer_drift(
    batches: Sequence[Batch],
    states: Callable[[Batch], Tensor | None],
    source: Callable[[Batch], Record],
    ranks: Ranks,
) -> dict[str, float]:
    """Return ‖h − h_source‖ / ‖h_source‖ after the last layer by domain; {} if a rank lacks it."""
    sums: dict[str, list[float]] = {}
    known = True
    for batch in batches:
        mine, theirs = states(batch), source(batch).left
        if mine is None or theirs is None or mine.shape != theirs.shape:
            known = False
            break
        own = sums.setdefault(batch.domain, [0.0, 0.0])
        own[0] += float((mine.double() - theirs.double()).square().sum())
        own[1] += float(theirs.double().square().sum())
    if not ranks.all_agree(known):
        return {}
    parts = ranks.gather(sums)
    drift = {}
    for domain in sums:
        gap, size = (sum(part[domain][at] for part in parts if domain in part) for at in (0, 1))
        drift[domain] = math.sqrt(gap / size) if size > 0.0 else 0.0
    return drift
