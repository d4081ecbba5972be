"""Refit: the weights with which the merged model computes what its sources compute.

Closed form. Every linear map, in the order of the forward pass, gets the weight that reproduces the
source's outputs y from the merged model's inputs x, with everything below already refitted:

    min_W  Σ_i (ω_i / N_i) Σ_t c_t ‖W x − y‖²  +  λ mean(diag G) ‖W − W_merged‖²

A map that writes to the hidden state targets the source's hidden state instead, so that each layer
also corrects the error of those below. Tokens of an expert count with c = w², their squared routing
weight. Held-out rows choose λ, and a map that loses on them keeps its merged weight.

Gradient steps. All maps of a layer are trained together, with h the hidden state after the layer:

    min  Σ_i (ω_i / N_i) Σ_t ‖h − h_source‖²

The head is trained on the KL divergence from the source's distribution. Held-out rows choose the
learning rate and the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from moemerge.checkpoint.patch import Quantised
from moemerge.config.repair_settings import RefitSettings
from moemerge.errors import ArchitectureError, UsageError
from moemerge.forward.input_hooks import ExpertsHook, LinearHook, UnitMap, head_input
from moemerge.forward.settings import stored_dtype
from moemerge.forward.stops import Arrival, ModuleStop
from moemerge.forward.stream import ModelStream
from moemerge.forward.tokens import real_rows, real_tokens, routing_of
from moemerge.forward.walk import Walk
from moemerge.repairs.descent import FIRST_RATE, Descent
from moemerge.repairs.inputs import base_notices, check_source_text
from moemerge.repairs.layer import Job, Layer, repair
from moemerge.repairs.least_squares import (
    Affine,
    Factor,
    Fit,
    FitSums,
    RidgeRule,
    concatenated,
    fit_map,
    parameter,
)
from moemerge.repairs.refit_experts import (
    BLOCK_VALUES,
    DomainKey,
    ExpertStack,
    RoutedBatch,
    blocks,
    by_domain,
    fit_projection,
    last_projection,
    own_projection,
    sample_size,
)
from moemerge.repairs.refit_maps import (
    LayerMaps,
    RouterMap,
    Storage,
    layer_maps,
    require_experts,
)
from moemerge.repairs.refit_report import (
    RefitReport,
    Row,
    experts_row,
    kind_of,
    kind_of_map,
    layer_row,
    map_row,
    matches_sources,
    progress_of,
    router_row,
    trained_row,
)
from moemerge.repairs.refit_router import fit_router
from moemerge.repairs.refit_states import (
    Activations,
    LayerCalls,
    RoundingCheck,
    followed_batches,
    layer_drift,
    of_experts,
    of_output,
    roundings_of,
)
from moemerge.repairs.router_problem import router_problem
from moemerge.repairs.routers import MERGED, Router, gate_notices, pair_routers
from moemerge.routing.cg import Status
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.gpu import to_host
from moemerge.text.batches import Batch

SAME = "a source is a model that was merged: same layers, same experts, same width"
BATCH_TOKENS = 4096  # at most, in a batch of gradient steps, which take one of every domain
HEAD_VALUES = 2**27  # logits that a gradient step computes of every domain
GROUP = 8192  # rows of the vocabulary that are fitted together
SAMPLED_ROWS = 2048  # rows, spread over the vocabulary, whose held-out error chooses λ


def prepare(job: Job[RefitSettings]) -> None:
    """Pair the routers; refuse settings, models and text that do not match."""
    settings, merged, sources = job.settings, job.merged, list(job.sources.values())
    gradient = settings.solver == "gradient"
    merged.require_readable("dequantise it to bfloat16 first and refit that")
    if settings.requantize == "same" and merged.checkpoint.quantisation is None:
        raise UsageError(
            f'`requantize="same"`: {merged.label} is not quantised', hint="leave it out"
        )
    if gradient and settings.offload not in ("auto", "device"):
        raise UsageError(
            f'`offload="{settings.offload}"`: gradient steps read the hidden states of all tokens '
            "again and again",
            hint='leave it out, or use `solver="closed-form"`',
        )
    stored = stored_dtype(merged.checkpoint)
    if job.stream.dtype.itemsize < stored.itemsize:
        raise UsageError(
            f"{merged.label} is stored in {dtype_name(stored)}; computing in "
            f"{dtype_name(job.stream.dtype)} would round the weights that are kept",
            hint=f'use `dtype="{dtype_name(stored)}"`, or convert the model first',
        )
    count = merged.architecture.num_layers
    chosen = settings.layers.resolve(count)
    job.layers = range(min(chosen), max(chosen) + 1)  # between them, the drift is followed
    job.notices += base_notices(job.request, merged, job.sources, pruned=bool(job.experts))
    if settings.router != "keep" and "router" in settings.parts and merged.architecture.family:
        job.pairs = pair_routers(merged, sources, chosen, job.experts)
        if job.pairs:
            job.notices += gate_notices(merged, sources, job.pairs[0])
    job.notices += [*job.text.notices, *check_source_text(merged, job.sources, job.text, SAME)]
    if gradient:
        job.stream = replace(job.stream, offload="device")
        job.batch_tokens = min(job.batch_tokens, BATCH_TOKENS)
    job.wants_entered = not gradient
    kept = Kept()
    job.fields["tokens"] = {domain.name: domain.tokens for domain in job.text.domains}
    job.fields["held_out_tokens"] = {d.name: sum(map(len, d.holdout)) for d in job.text.domains}
    if "head" in settings.parts and len(chosen) == count:
        job.heads, job.final, job.on_final = True, "hidden", kept.keep_final
    job.state, job.on_open = kept, partial(kept.open, job)


def strict(row: Row) -> tuple[str, str] | None:
    """Refuse routers that did not converge, and maps that keep their weights."""
    bad = [m for m in row["maps"] if m.get("status", Status.CONVERGED) != Status.CONVERGED]
    kept = [m for m in row["maps"] if m["kept"] is True and not matches_sources(m)]
    if row["notices"] and (bad or kept):
        return row["notices"][0], "give more text, or leave `strict` out"
    return None


# --- the repair -----------------------------------------------------------------------------------


class Kept:
    """What a refit keeps from layer to layer besides its report."""

    def __init__(self) -> None:
        self.finals: dict[str, dict[int, Tensor]] = {}  # by model and id of the batch

    def keep_final(self, name: str, batch: Batch, hidden: Tensor) -> None:
        self.finals.setdefault(name, {})[id(batch)] = hidden

    def open(self, job: Job[RefitSettings], walk: Walk) -> None:
        """Attach recorders to the models, and find the maps to refit."""
        merged, settings = walk.lead, job.settings
        sources = {name: stream for name, stream in walk.streams.items() if name != MERGED}
        require_same_shapes(job, merged, sources)
        self.seen = Activations({"": merged, **sources}, job.ranks)
        self.followed = followed_batches(job.batches)
        self.calls = LayerCalls(
            merged,
            self.followed,
            every=settings.solver == "gradient",
            drift=not job.output.resumed,
        )
        units = UnitMap(job.merged.checkpoint, job.merged.architecture, merged.names)
        if "experts" in settings.parts:
            require_experts(units, merged)
        same = settings.requantize == "same"
        self.storage = Storage(job.merged.checkpoint, merged, units, same=same)
        routers = {pair.info.weight: pair for pair in job.pairs}
        chosen = settings.layers.resolve(job.merged.architecture.num_layers)
        found = {n: layer_maps(merged, n, units, routers, settings.parts) for n in chosen}
        self.maps = {number: maps for number, (maps, _) in found.items()}
        self.head = merged.input_hooks.head if job.heads else None
        notices = [notice for _, own in found.values() for notice in own]
        if "head" in settings.parts and merged.input_hooks.head is None:
            notices.append(
                "the head shares its matrix with the embedding, so it keeps its merged weights"
            )
        elif "head" in settings.parts and not job.heads:
            notices.append("the head keeps its merged weights, since not all layers are refitted")
        for notice in dict.fromkeys(notices):
            job.note(notice)
        tokens: Counter[DomainKey] = Counter()
        for batch in job.all_batches:
            tokens[batch.domain, batch.holdout] += batch.tokens
        # √(ω_i / N_i) of each domain's calibration and held-out rows.
        self.scales = {key: math.sqrt(job.weights[key[0]] / count) for key, count in tokens.items()}


def rounds_to_stored_format(settings: RefitSettings) -> Quantised:
    return "same" if settings.requantize == "same" else "floats"


@repair(
    "refit",
    prepare=prepare,
    report=RefitReport,
    memory=lambda job, walk: extra_bytes(job, walk),
    strict=strict,
    quantised=rounds_to_stored_format,
)
def refit(layer: Layer, settings: RefitSettings) -> None:
    """Replace the maps of a layer, or the head."""
    kept: Kept = layer.job.state
    if layer.is_head:
        if kept.head is not None:
            with layer.errors("while it was refitted"), layer.job.stopwatch.span("fit the head"):
                refit_head(layer, kept, kept.head)
        return
    seen, maps = kept.seen, kept.maps.get(layer.number, LayerMaps())
    kept.calls.follow(layer.module)
    if not maps.paths:
        seen.begin(None, {})
        return
    gradient = settings.solver == "gradient"
    seen.begin(None if gradient else maps, layer.entered)
    layer.run_sources()
    fit = train_layer if gradient else solve_layer
    with layer.errors("while its maps were refitted"):
        rows, notices, left = fit(layer, kept, maps)
    # The model's code reads some matrices without calling their module: nothing stops there.
    if never := left & seen.structure.called:
        raise ArchitectureError(
            f"{layer.job.merged.label}: the model never ran {', '.join(sorted(never))}",
            hint="config.json and weights may not belong together",
        )
    notices += [
        f"layer {layer.number}: {path} is not called as a module, so it is not refitted"
        for path in sorted(left)
    ]
    layer.store(stored_tensors(layer, kept, maps))
    device = layer.job.device

    def drift(states: Callable[[Batch], Tensor | None]) -> dict[str, float]:
        return layer_drift(kept.followed, states, seen.source, layer.job.ranks)

    row = layer_row(
        layer.number,
        rows,
        drift(lambda batch: kept.calls.as_merged(batch, real_rows(batch, device))),
        drift(lambda batch: seen.merged[id(batch)].left),
        notices,
    )
    layer.report(row, f"{layer.name}{progress_of(row)}")


def stored_tensors(layer: Layer, kept: Kept, maps: LayerMaps) -> dict[str, Tensor]:
    """Return the stored tensors of a layer's linear maps and experts; rank 0 writes them."""
    tensors: dict[str, Tensor] = {}
    if not layer.job.ranks.leads:
        return tensors
    storage, model = kept.storage, layer.merged.model
    for hook in maps.linear.values():
        storage.write(storage.linear(hook), parameter(model, hook.weight), tensors)
    for path, experts in maps.experts.items():
        stack = ExpertStack(model.get_submodule(path), experts)
        for (which, expert), parts in storage.experts(experts, stack.module).items():
            storage.write(parts, stack.weight(which, expert), tensors)
    return tensors


# --- gradient steps -------------------------------------------------------------------------------

Result = tuple[list[Row], list[str], set[str]]  # rows, notices, maps that never ran


def train_layer(layer: Layer, kept: Kept, maps: LayerMaps) -> Result:
    """Train all maps of a layer together, once it stands before the first of them."""
    job, model = layer.job, layer.merged.model
    left, rows = set(maps.paths), []
    while (stop := layer.run_to(maps.paths)) is not None:
        if len(left) == len(maps.paths):
            layer.merged.give_back()
            with job.stopwatch.span("train"):
                rows.append(_train(layer, kept, maps))
        left.discard(stop.path)
    tensors = {}
    for router in maps.routers.values():
        for here, name in router.names.items():
            info = job.merged.checkpoint.tensors[name]
            tensors[name] = to_host(parameter(model, here)).reshape(info.shape).to(info.dtype.torch)
    layer.store(tensors)
    return rows, [], left


def _train(layer: Layer, kept: Kept, maps: LayerMaps) -> Row:
    model, module, seen = layer.merged.model, layer.module, kept.seen

    def squares(batch: Batch) -> Tensor:
        wanted, found = seen.source(batch).left, kept.calls.output(module, batch)
        if wanted is None or found.shape != wanted.shape:
            raise ArchitectureError(
                f"layer {layer.number} does not return the hidden states of its tokens",
                hint='use `solver="closed-form"`',
            )
        return (found.float() - wanted.float()).square().sum()

    experts = [name for hook in maps.experts.values() for name in (hook.up, hook.down)]
    names = [
        *(hook.weight for hook in maps.linear.values()),
        *experts,
        *(router.module.weight for router in maps.routers.values()),
    ]
    trained = {model.get_parameter(n): kept.storage.dtype(n) for n in dict.fromkeys(names)}
    fit, rate = descent(layer, trained, squares).run()
    return trained_row(layer.path, "hidden state", fit, rate)


def descent(
    layer: Layer, trained: Mapping[nn.Parameter, torch.dtype], loss: Callable[[Batch], Tensor]
) -> Descent:
    """Return the training of some weights, which begins at the rate of the last layer."""
    job = layer.job
    return Descent(
        trained,
        loss,
        job.batches,
        "the head" if layer.is_head else layer.name,
        job.weights,
        job.ranks,
        job.settings.steps,
        job.settings.seed,
        rate=layer.earlier[-1]["maps"][0]["rate"] if layer.earlier else FIRST_RATE,
    )


# --- closed form ----------------------------------------------------------------------------------


def solve_layer(layer: Layer, kept: Kept, maps: LayerMaps) -> Result:
    """Solve for each map when the merged model stands before it."""
    job, seen = layer.job, kept.seen
    left, rows, notices = set(maps.paths), [], []
    rule = ridge_rule(layer)
    shared: Inputs | None = None
    while (stop := layer.run_to(maps.paths)) is not None:
        layer.merged.give_back()
        left.discard(stop.path)
        if stop.path in maps.routers:
            with job.stopwatch.span("fit routers"):
                rows.append(solve_router(layer, kept, stop, maps.routers[stop.path]))
            continue
        recorded = seen.structure.place(stop.path) is not None or all(
            stop.path in seen.source(a.batch).inputs for a in stop.arrivals
        )
        if not recorded or not all(a.given for a in stop.arrivals):
            notices.append(
                f"layer {layer.number}: {stop.path} gets inputs that are not the text's "
                "tokens: it keeps its merged weights"
            )
            continue
        if stop.path in maps.experts:
            shared = None
            with job.stopwatch.span("fit experts"):
                rows += solve_experts(layer, kept, stop, maps.experts[stop.path], rule)
            continue
        writes = seen.structure.place(stop.path) is not None
        if writes or shared is None or not stop.same_input:
            shared = Inputs([a.batch for a in stop.arrivals], [a.given[0] for a in stop.arrivals])
        with job.stopwatch.span("fit maps"):
            rows.append(solve_linear(layer, kept, maps.linear[stop.path], shared, rule))
        shared = None if writes else shared
    return rows, notices, left


def ridge_rule(layer: Layer) -> RidgeRule:
    """Return how λ is chosen; a search begins at that of the last map of its kind."""
    ridge = layer.job.settings.ridge
    maps = (one for row in layer.earlier for one in row["maps"] if one.get("ridge") is not None)
    return RidgeRule(
        None if ridge == "auto" else ridge, {kind_of(one): one["ridge"] for one in maps}
    )


def solve_router(layer: Layer, kept: Kept, stop: ModuleStop, router: RouterMap) -> Row:
    """Solve for a router: the KL itself on each source's own routing, or HARC's objective."""
    job, seen = layer.job, kept.seen
    exact = job.settings.router == "exact"
    stops = {}
    for name in job.sources if exact else ():
        arrivals = [
            Arrival(a.batch, (seen.source(a.batch).inputs[stop.path],))
            for a in stop.arrivals
            if a.batch.domain == name
        ]
        weights = layer.sources[name].weights
        stops[name] = ModuleStop(stop.path, layer.number, arrivals, False, None, weights)
    at = Router(job.merged, job.sources, router.pair, stop, stops)
    problem = router_problem(job, at)
    # Concatenated, so that a product is one kernel launch, not one per batch.
    domains, holdout = (
        [
            replace(
                domain,
                features=[concatenated(domain.features)],
                targets=None if domain.targets is None else [concatenated(domain.targets)],
            )
            for domain in side
        ]
        for side in (problem.domains, problem.holdout)
    )
    problem = replace(problem, domains=domains, holdout=holdout)
    fit = fit_router(problem, exact=exact)
    seen.forget_inputs(stop.path)
    layer.replace(at.updated(fit.weight))
    return router_row(router.pair.info.weight, fit)


# --- linear maps ---

# (batch, rows, their inputs) -> residuals of the map (n, out), and the factor of its output
Missing = Callable[[Batch, slice, Tensor], tuple[Tensor, Tensor | float]]


@dataclass
class Inputs:
    """The inputs of a map, by batch; the Gram is summed once for maps that share them."""

    batches: Sequence[Batch]
    values: Sequence[Tensor]  # (tokens, in) by batch
    sums: tuple[FitSums, FitSums] | None = None  # of the first map, for all to share their Gram


def solve_linear(
    layer: Layer, kept: Kept, hook: LinearHook, inputs: Inputs, rule: RidgeRule
) -> Row:
    """Solve for a linear map; use its new weight from here on."""
    seen, job, model = kept.seen, layer.job, layer.merged.model
    place = seen.structure.place(hook.path)
    missing = (
        own_output(layer, seen, hook)
        if place is None
        else state_gap(layer, seen, hook, place, inputs)
    )
    sums, held = sum_up(layer, kept, inputs, hook.shape[0], missing)
    old = parameter(model, hook.weight)

    def solve() -> tuple[Tensor, Fit]:
        ridge = rule.choose(kind_of_map(hook.weight), [(sums, held)])
        stored = kept.storage.dtype(hook.weight)
        quantise = kept.storage.quantise(kept.storage.linear(hook))
        return fit_map(old, sums, held, Factor(sums.gram, ridge), stored, quantise=quantise)

    weight, fit = on_lead(job, solve)
    with torch.no_grad():
        old.copy_(weight)
    seen.forget_inputs(hook.path)
    seen.forget_states(place)
    return map_row(hook.weight, "output" if place is None else "hidden state", fit)


def own_output(layer: Layer, seen: Activations, hook: LinearHook) -> Missing:
    """Return residuals to the output of the source's map on the source's own input."""
    now = Affine.of(layer.merged.model, hook.weight).widened()
    wanted = {
        name: Affine.of(stream.model, hook.weight).widened()
        for name, stream in layer.sources.items()
    }

    def missing(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
        theirs = seen.source(batch).inputs[hook.path][rows]
        return wanted[batch.domain](theirs) - now(x), 1.0

    return missing


def state_gap(
    layer: Layer, seen: Activations, hook: LinearHook, place: int, inputs: Inputs
) -> Missing:
    """Return residuals to the source's hidden state after this write."""
    now = Affine.of(layer.merged.model, hook.weight).widened()
    write = seen.structure.writes[place]

    def written(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
        factor = seen.coefficient(batch, write, rows, source=False)
        return factor * now(x), factor

    def gap(batch: Batch, rows: slice, output: Tensor) -> Tensor:
        wanted = seen.after(batch, place + 1, rows, source=True)
        return wanted - seen.after(batch, place, rows, source=False) - output

    def compared(batch: Batch, x: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        output, _ = written(batch, rows, x[rows])
        bound = of_output(output, x.dtype, hook.shape[1], roundings_of(write))
        bound += seen.rounding(batch, place, rows, output)
        return gap(batch, rows, output), bound

    check = RoundingCheck(layer.sources)
    for batch, x in zip(inputs.batches, inputs.values, strict=True):
        check.compare(batch, partial(compared, batch, x))
    matching = check.matching(layer.job.ranks)

    def missing(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
        output, factor = written(batch, rows, x)
        if batch.domain in matching:
            return torch.zeros_like(output), factor
        return gap(batch, rows, output), factor

    return missing


def sum_up(
    layer: Layer, kept: Kept, inputs: Inputs, outputs: int, missing: Missing
) -> tuple[FitSums, FitSums]:
    """Return sums over calibration rows and over held-out rows; rank 0 gets those of all ranks."""
    width, device = inputs.values[0].shape[1], inputs.values[0].device
    fresh = inputs.sums is None
    if inputs.sums is None:
        shape = outputs, width, device
        sums = inputs.sums = FitSums.empty(*shape), FitSums.empty(*shape)
    else:
        calibration, held = inputs.sums
        sums = calibration.sharing_gram(outputs), held.sharing_gram(outputs)
    for batch, x in zip(inputs.batches, inputs.values, strict=True):
        own = kept.scales[batch.domain, batch.holdout]
        scale = torch.full((1,), own, dtype=torch.float64, device=device)
        for rows in blocks(x.shape[0], max(outputs, width), device):
            part = x[rows]
            residual, factor = missing(batch, rows, part)
            sums[batch.holdout].add(part, residual, scale, factor=factor, gram=fresh)
    for one in sums:
        one.add_up(layer.job.ranks, gram=fresh)
    return sums


def on_lead(job: Job[Any], fit: Callable[[], tuple[Tensor, Fit]]) -> tuple[Tensor, Fit]:
    """Run a fit on rank 0, which alone has the sums, and return the result in every rank."""
    if job.ranks.count == 1:
        return fit()

    def made() -> tuple[Tensor, Fit]:
        weight, found = fit()
        return weight.cpu(), found

    return job.ranks.call_on_lead(made)


# --- experts ---


def solve_experts(
    layer: Layer, kept: Kept, stop: ModuleStop, hook: ExpertsHook, rule: RidgeRule
) -> list[Row]:
    """Solve for all experts of a layer: their first projections, then their last."""
    seen, job = kept.seen, layer.job
    stack = ExpertStack(layer.merged.model.get_submodule(hook.path), hook)
    theirs = {
        name: ExpertStack(
            stream.model.get_submodule(hook.path),
            hook,
            job.experts.get(name, {}).get(layer.number),
        )
        for name, stream in layer.sources.items()
    }
    batches = [RoutedBatch(a.batch, *routing_of(hook.path, a.given)) for a in stop.arrivals]
    routings = by_domain(batches, hook.count)
    states = {
        r.key: concatenated([seen.source(b).inputs[hook.path] for b in r.batches]) for r in routings
    }
    seen.forget_inputs(hook.path)

    def source(key: DomainKey) -> tuple[ExpertStack, Tensor]:
        return theirs[key[0]], states[key]

    rows: list[Row] = []
    place = seen.structure.place(hook.path)
    for which in ("up", "down"):
        if which == "up" or place is None:
            problem, target = own_projection(stack, which, source), "output"
        else:
            states.clear()
            shares, factors = expert_gaps(layer, seen, stack, batches, place)
            problem, target = last_projection(stack, shares, factors), "hidden state"
        fits = fit_projection(
            stack,
            which,
            routings,
            problem,
            scales=kept.scales,
            rule=rule,
            storage=kept.storage,
            ranks=job.ranks,
        )
        rows.append(experts_row(getattr(hook, which), target, fits))
    seen.forget_states(place)
    return rows


def expert_gaps(
    layer: Layer, seen: Activations, stack: ExpertStack, routed: Sequence[RoutedBatch], place: int
) -> tuple[dict[DomainKey, Tensor], dict[DomainKey, Tensor | float]]:
    """Return the residual of the hidden state after the new first projections, and the factor of
    the experts' output, by domain.

    The residual is divided by the sum of a token's routing weights, since all of its experts share
    it.
    """
    write, everything = seen.structure.writes[place], slice(None)
    roundings = roundings_of(write) + of_experts(routed[0].chosen.shape[1])
    terms = stack.weight("down", 0).shape[1]
    shares: dict[DomainKey, list[Tensor]] = {}
    factors: dict[DomainKey, list[Tensor | float]] = {}
    check = RoundingCheck(layer.sources)
    for one in routed:
        batch, key = one.batch, (one.batch.domain, one.batch.holdout)
        with torch.no_grad():
            output: Tensor = stack.module(one.x, one.chosen, one.weights)
        factor = seen.coefficient(batch, write, everything, source=False)
        gap = seen.after(batch, place + 1, everything, source=True)
        gap = gap - seen.after(batch, place, everything, source=False)
        written = factor * output
        gap -= written

        def compared(
            rows: slice, *, batch: Batch, gap: Tensor, written: Tensor, dtype: torch.dtype
        ) -> tuple[Tensor, Tensor]:
            wide = written[rows].to(gap.dtype)
            bound = of_output(wide, dtype, terms, roundings)
            bound += seen.rounding(batch, place, rows, wide)
            return gap[rows], bound

        check.compare(
            batch, partial(compared, batch=batch, gap=gap, written=written, dtype=one.x.dtype)
        )
        shares.setdefault(key, []).append(gap / one.total())
        factors.setdefault(key, []).append(factor)
    matching = check.matching(layer.job.ranks)
    together = {key: concatenated(shares.pop(key)) for key in list(shares)}
    for (domain, _), gaps in together.items():
        if domain in matching:
            gaps.zero_()
    return together, {key: _together(parts) for key, parts in factors.items()}


def _together(factors: list[Tensor | float]) -> Tensor | float:
    """Concatenate the factors of all batches: one number, or one per token."""
    tensors = [factor for factor in factors if isinstance(factor, Tensor)]
    return concatenated(tensors) if tensors else factors[0]


# --- the head -------------------------------------------------------------------------------------


def refit_head(layer: Layer, kept: Kept, hook: LinearHook) -> None:
    """Replace the head: logits of the sources, from the merged model's final states."""
    streams = {MERGED: layer.merged, **layer.sources}
    heads = {
        name: Affine(stream.weights.fetch([hook.weight])[hook.weight], None)
        for name, stream in streams.items()
    }
    inputs: dict[str, dict[int, Tensor]] = {}
    for name, finals in kept.finals.items():
        stream = streams[name]
        for batch in layer.job.batches:
            if id(batch) in finals:
                hidden = finals.pop(id(batch))
                x = head_input(stream.model, stream.anatomy.owner, hook, hidden)
                own = real_tokens(x, batch, real_rows(batch, x.device))
                assert own is not None
                inputs.setdefault(name, {})[id(batch)] = own
    ours = inputs.pop(MERGED)
    theirs = {key: x for own in inputs.values() for key, x in own.items()}
    merged, stored = heads.pop(MERGED), kept.storage.dtype(hook.weight)
    if layer.job.settings.solver == "gradient":
        weight, row = train_head(layer, hook, merged.weight, stored, heads, ours, theirs)
    else:
        batches = layer.job.batches
        given = Inputs(batches, [ours[id(batch)] for batch in batches])
        weight, fit = solve_head(layer, kept, merged, heads, given, theirs, stored)
        row = map_row(hook.weight, "output", fit)
    tensors: dict[str, Tensor] = {}
    kept.storage.write(kept.storage.linear(hook), weight, tensors)
    layer.store(tensors)
    report = layer_row(None, [row], {}, {}, [])
    layer.report(report, f"{layer.name}{progress_of(report)}")


def train_head(
    layer: Layer,
    hook: LinearHook,
    weight: Tensor,
    stored: torch.dtype,
    heads: Mapping[str, Affine],
    ours: Mapping[int, Tensor],
    theirs: Mapping[int, Tensor],
) -> tuple[Tensor, Row]:
    """Train the head on the KL divergence from the source's distribution."""
    trained = nn.Parameter(weight.clone())
    most = max(1, HEAD_VALUES // weight.shape[0])

    def divergence(batch: Batch) -> Tensor:
        total = weight.new_zeros((), dtype=torch.float32)
        for start in range(0, batch.tokens, most):
            rows = slice(start, start + most)
            wanted = heads[batch.domain](theirs[id(batch)][rows]).float().log_softmax(-1)
            found = (ours[id(batch)][rows] @ trained.T).float().log_softmax(-1)
            total = total + kl_div(found, wanted, reduction="sum", log_target=True)
        return total

    fit, rate = descent(layer, {trained: stored}, divergence).run()
    return trained.detach(), trained_row(hook.weight, "distribution", fit, rate)


def solve_head(
    layer: Layer,
    kept: Kept,
    merged: Affine,
    sources: Mapping[str, Affine],
    inputs: Inputs,
    theirs: Mapping[int, Tensor],
    stored: torch.dtype,
) -> tuple[Tensor, Fit]:
    """Solve for the head. A vocabulary is large, so its rows are fitted in groups that share the
    Gram of their inputs."""

    def rows_of(affine: Affine, rows: slice) -> Affine:
        return Affine(affine.weight[rows], None).widened()

    def missing(group: slice) -> Missing:
        now = rows_of(merged, group)
        wanted = {name: rows_of(affine, group) for name, affine in sources.items()}

        def of(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
            return wanted[batch.domain](theirs[id(batch)][rows]) - now(x), 1.0

        return of

    job, rule, count = layer.job, ridge_rule(layer), merged.weight.shape[0]
    sampled = []
    if rule.fixed is None:
        some = slice(0, count, max(1, count // SAMPLED_ROWS))
        rows = len(range(*some.indices(count)))
        sampled = [sum_up(layer, kept, inputs, rows, missing(some))]
    ridge = job.ranks.call_on_lead(lambda: rule.choose("head", sampled))
    factor: Factor | None = None
    new, fits = torch.empty_like(merged.weight, dtype=stored), []
    for begin in range(0, count, GROUP):
        group = slice(begin, min(begin + GROUP, count))
        sums = sum_up(layer, kept, inputs, group.stop - group.start, missing(group))
        if not job.ranks.leads:
            continue
        factor = factor or Factor(sums[0].gram, ridge)
        new[group], fit = fit_map(merged.weight[group], *sums, factor, stored, keep=False)
        fits.append(fit)

    def chosen() -> tuple[Tensor, Fit]:
        """Errors of the groups add up, and all groups are kept or none is."""
        before, after = sum(f.before for f in fits), sum(f.after for f in fits)
        held_before = held_after = None
        loses = after > before
        if fits[0].held_tokens:
            held_before = sum(f.held_before or 0.0 for f in fits)
            held_after = sum(f.held_after or 0.0 for f in fits)
            loses = held_after >= held_before
        if loses:
            after, held_after = before, held_before
        fit = replace(
            fits[0],
            before=before,
            after=after,
            held_before=held_before,
            held_after=held_after,
            kept=loses,
        )
        return merged.weight.to(stored) if loses else new, fit

    return on_lead(job, chosen)


# --- shapes and memory ----------------------------------------------------------------------------


def require_same_shapes(
    job: Job[Any], merged: ModelStream, sources: Mapping[str, ModelStream]
) -> None:
    """Check that every parameter of the layers has a counterpart in every source.

    Experts and routers of a source with more experts differ in one axis.
    """
    ours = {name: p.shape for name, p in merged.model.named_parameters()}
    inside = tuple(path + "." for path in merged.anatomy.layers)
    for name, stream in sources.items():
        theirs = {n: p.shape for n, p in stream.model.named_parameters()}
        for key in sorted(k for k in ours.keys() | theirs.keys() if k.startswith(inside)):
            mine, other = ours.get(key), theirs.get(key)
            if mine == other:
                continue
            both = mine is not None and other is not None and len(mine) == len(other)
            differing = sum(a != b for a, b in zip(mine or (), other or (), strict=False))
            if name in job.experts and both and differing == 1:
                continue
            shapes = ["missing" if s is None else str(list(s)) for s in (other, mine)]
            raise ArchitectureError(
                f"{key} is {shapes[0]} in {job.sources[name].what}, and {shapes[1]} in "
                f"{job.merged.label}",
                hint="a source is a model that was merged: same layers, experts and width",
            )


# Hidden states per token that are kept of a layer. Of its source: the outputs of two norms and of
# attention, and the states before and after. Of the merged model: the current input, the output of
# attention, and the state before. Inputs of experts are concatenated by domain once more, of both.
# The residual of the hidden state is float32 at least.
SOURCE_STATES = 6
MERGED_STATES = 4
MISSING_STATES = 2
# Batches that wait on the device hold most of these states, except this number.
MORE_STATES = 2
# Copies of a map's Gram and cross products in float64: the sums, their factor, the solution and the
# candidates compared with it, for calibration and held-out rows.
SUM_COPIES = 6
BLOCKS = 4  # of outputs in float32 at a time
# Of gradient steps, per weight: its gradient, first value and rounded value in the forward dtype; a
# float32 copy, its gradient and two moments.
WEIGHT_COPIES = 3
WEIGHT_FLOATS = 4
# Activations of a batch that its backward pass reads, in hidden states.
BACKWARD_STATES = 64


def extra_bytes(job: Job[RefitSettings], walk: Walk) -> int:
    """Estimate the memory of a refit besides its streams."""
    models, stream = walk.memory, walk.lead
    # One model runs at a time.
    shared = sum(memory.running for memory in models) - max(memory.running for memory in models)
    waiting = stream.memory.offload == "device"
    if waiting and not any(batch.padded for batch in job.batches):
        shared += sum(memory.features for memory in models)  # read without a copy
    width, item = job.merged.architecture.hidden_size or 0, job.stream.dtype.itemsize
    tokens = sum(batch.tokens for batch in job.batches)
    head = stream.input_hooks.head if job.heads else None
    if job.settings.solver == "gradient":
        copies = WEIGHT_COPIES * item + 4 * WEIGHT_FLOATS
        layers = [
            sum(p.numel() for p in stream.model.get_submodule(path).parameters())
            for path in stream.anatomy.layers
        ]
        step = BACKWARD_STATES * job.batch_tokens * width * item
        last = 0
        if head is not None:
            own = head.shape[0] * head.shape[1]
            last = own * (copies + (2 + len(job.sources)) * item) + 4 * 4 * HEAD_VALUES
        states = (1 + MORE_STATES) * tokens * width * item
        return states + max(max(layers) * copies + step, last) - shared
    kept = MORE_STATES if waiting else SOURCE_STATES + MERGED_STATES
    states = (kept * item + MISSING_STATES * max(4, item)) * tokens * width
    largest = 0
    for hook in (hook for hooks in stream.input_hooks.layers for hook in hooks):
        if isinstance(hook, ExpertsHook):
            # Experts are fitted one by one. The sums of those that choose λ are held together.
            for name in (hook.up, hook.down):
                shape = stream.model.get_parameter(name).shape[1:]
                held = 2 * sample_size(shape) if job.settings.ridge == "auto" else 2
                values = max(shape) * sum(shape)  # whichever side is the input
                largest = max(largest, (SUM_COPIES + held) * values)
        else:
            outputs, inputs = hook.shape
            largest = max(largest, SUM_COPIES * inputs * (inputs + outputs))
    resident = 0
    if head is not None:
        rows, inputs = head.shape
        largest = max(largest, SUM_COPIES * inputs * (inputs + min(rows, GROUP)))
        resident = (2 + len(job.sources)) * rows * inputs * item + 2 * tokens * inputs * item
    block = BLOCK_VALUES.get(job.device.type, BLOCK_VALUES["cpu"])
    return max(states, resident) + 8 * largest + 4 * BLOCKS * block - shared
