"""Refit the maps of one decoder layer, one after the other, in the order of the forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moemerge.forward.input_hooks import ExpertsHook, LinearHook
from moemerge.forward.stops import Stop
from moemerge.forward.tokens import routing_of
from moemerge.repairs.refitting.experts import (
    DomainKey,
    ExpertStack,
    ProjectionFit,
    RoutedBatch,
    by_domain,
    last_projection,
    own_projection,
)
from moemerge.repairs.refitting.job import RefitJob
from moemerge.repairs.refitting.least_squares import (
    Affine,
    Factor,
    Fit,
    RidgeRule,
    concatenated,
    fit_map,
    parameter,
)
from moemerge.repairs.refitting.linear import Inputs, Missing, fitted_by_lead, sum_up
from moemerge.repairs.refitting.plan import LayerPlan, Storage
from moemerge.repairs.refitting.report import Row, experts_row, kind_of_map, map_row
from moemerge.repairs.refitting.targets import (
    LayerStructure,
    LayerView,
    RoundingCheck,
    of_experts,
    of_output,
    roundings_of,
)
from moemerge.text.batches import Batch


@dataclass
class LayerFitter:
    """Refits the maps of one layer of the merged model."""

    plan: LayerPlan
    structure: LayerStructure
    merged: LayerView
    sources: Mapping[str, LayerView]  # by domain
    job: RefitJob
    ridge: RidgeRule
    storage: Storage
    notices: list[str] = field(default_factory=list)
    _shared: Inputs | None = None

    def fit(self, stop: Stop) -> list[Row]:
        """Refit the map that all batches stopped before, and store its weight."""
        if not all(a.given for a in stop.arrivals) or not self._recorded(stop):
            self.notices.append(
                f"layer {self.plan.number}: {stop.path} gets inputs that are not the text's "
                "tokens: it keeps its merged weights"
            )
            return []
        if stop.path in self.plan.experts:
            self._shared = None
            return self._experts(stop, self.plan.experts[stop.path])
        return [self._linear(stop, self.plan.linear[stop.path])]

    def _recorded(self, stop: Stop) -> bool:
        """Return whether the sources' inputs of this map were recorded."""
        if self.structure.place(stop.path) is not None:
            return True
        return all(
            stop.path in self.sources[a.batch.domain].record(a.batch).inputs for a in stop.arrivals
        )

    # --- linear maps ---

    def _linear(self, stop: Stop, hook: LinearHook) -> Row:
        place = self.structure.place(hook.path)
        inputs = self._inputs(stop, alone=place is not None)
        missing = self._own(hook) if place is None else self._residual(stop, hook, place)
        calibration, held = sum_up(self.job, inputs, hook.shape[0], missing)
        old = parameter(self.merged.model, hook.weight)

        def fit() -> tuple[Tensor, Fit]:
            ridge = self.ridge.choose(kind_of_map(hook.weight), [(calibration, held)])
            return fit_map(
                old,
                calibration,
                held,
                Factor(calibration.gram, ridge),
                self.storage.dtype(hook.weight),
                quantise=self.storage.quantise(self.storage.linear(hook)),
            )

        weight, found = fitted_by_lead(fit, self.job.ranks)
        with torch.no_grad():
            old.copy_(weight)
        self.forget(hook.path)
        self._forget_states(place)
        target = "output" if place is None else "hidden state"
        return map_row(hook.weight, target, found)

    def _inputs(self, stop: Stop, *, alone: bool) -> Inputs:
        if not stop.shared or self._shared is None or alone:
            inputs = Inputs([a.batch for a in stop.arrivals], [a.given[0] for a in stop.arrivals])
            self._shared = None if alone else inputs
            return inputs
        return self._shared

    def _own(self, hook: LinearHook) -> Missing:
        """Return residuals to the output of the source's map on the source's own input."""
        now = Affine.of(self.merged.model, hook.weight).widened()
        wanted = {
            name: Affine.of(view.model, hook.weight).widened()
            for name, view in self.sources.items()
        }

        def missing(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
            theirs = self.sources[batch.domain].record(batch).inputs[hook.path][rows]
            return wanted[batch.domain](theirs) - now(x), 1.0

        return missing

    def _residual(self, stop: Stop, hook: LinearHook, place: int) -> Missing:
        """Return residuals to the source's hidden state after this write."""
        now = Affine.of(self.merged.model, hook.weight).widened()
        state, write = self.structure, self.structure.writes[place]

        def written(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
            factor = state.coefficient(self.merged, batch, write, rows)
            return factor * now(x), factor

        def residual(batch: Batch, rows: slice, output: Tensor) -> Tensor:
            wanted = state.after(self.sources[batch.domain], batch, place + 1, rows)
            return wanted - state.after(self.merged, batch, place, rows) - output

        def compared(batch: Batch, inputs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            output, _ = written(batch, rows, inputs[rows])
            bound = of_output(output, inputs.dtype, hook.shape[1], roundings_of(write))
            bound += state.rounding(self.merged, batch, place, rows, output)
            return residual(batch, rows, output), bound

        check = RoundingCheck(self.sources)
        for arrival in stop.arrivals:
            check.compare(arrival.batch, partial(compared, arrival.batch, arrival.given[0]))
        matching = check.matching(self.job.ranks)

        def missing(batch: Batch, rows: slice, x: Tensor) -> tuple[Tensor, Tensor | float]:
            output, factor = written(batch, rows, x)
            if batch.domain in matching:
                return torch.zeros_like(output), factor
            return residual(batch, rows, output), factor

        return missing

    # --- experts ---

    def _experts(self, stop: Stop, hook: ExpertsHook) -> list[Row]:
        stack = ExpertStack(self.merged.model.get_submodule(hook.path), hook)
        theirs = {
            name: ExpertStack(
                view.model.get_submodule(hook.path),
                hook,
                self.job.experts.get(name, {}).get(self.plan.number),
            )
            for name, view in self.sources.items()
        }

        batches = [RoutedBatch(a.batch, *routing_of(hook.path, a.given)) for a in stop.arrivals]
        routings = by_domain(batches, hook.count)
        states = {
            r.key: concatenated(
                [self.sources[b.domain].record(b).inputs[hook.path] for b in r.batches]
            )
            for r in routings
        }
        self.forget(hook.path)

        def source(key: DomainKey) -> tuple[ExpertStack, Tensor]:
            return theirs[key[0]], states[key]

        rows: list[Row] = []
        place = self.structure.place(hook.path)
        for which in ("up", "down"):
            if which == "up" or place is None:
                problem, target = own_projection(stack, which, source), "output"
            else:
                states.clear()
                problem, target = self._last(stack, batches, place), "hidden state"
            fits = ProjectionFit(self.job, self.storage, stack, which).run(
                routings, problem, self.ridge
            )
            rows.append(experts_row(getattr(hook, which), target, fits))
        self._forget_states(place)
        return rows

    # --- releasing memory ---

    def forget(self, path: str) -> None:
        """Release the sources' recorded inputs of a module."""
        if path in self.structure.leaders.values():
            return
        for view in self.sources.values():
            for record in view.records.values():
                record.inputs.pop(path, None)

    def _forget_states(self, place: int | None) -> None:
        """Release the sources' states inside the layer when only its last write is left.

        That write needs only the state after the layer.
        """
        if place is None or place + 2 < len(self.structure.writes):
            return
        for view in self.sources.values():
            for record in view.records.values():
                if record.left is not None:
                    record.entered = None
                    record.outputs.clear()

    def _last(self, stack: ExpertStack, routed: list[RoutedBatch], place: int) -> Any:
        """Return the problem of the last projections: the residual of the hidden state after the
        new first projections, by domain.

        It is divided by the sum of a token's routing weights, since all of its experts share it.
        """
        sizes: dict[DomainKey, int] = {}
        for routing in routed:
            key = (routing.batch.domain, routing.batch.holdout)
            sizes[key] = sizes.get(key, 0) + routing.x.shape[0]
        shares: dict[DomainKey, Tensor] = {}
        filled = dict.fromkeys(sizes, 0)
        factors: dict[DomainKey, list[Tensor | float]] = {}
        check = RoundingCheck(self.sources)
        for routing in routed:
            key = (routing.batch.domain, routing.batch.holdout)
            gap, factor = self._gap(stack, routing, place, check)
            gap = gap / routing.total()
            # Written in place: kept separately and then concatenated, they would exist twice.
            if key not in shares:
                shares[key] = gap.new_empty(sizes[key], gap.shape[1])
            shares[key][filled[key] : filled[key] + gap.shape[0]] = gap
            filled[key] += gap.shape[0]
            factors.setdefault(key, []).append(factor)
        matching = check.matching(self.job.ranks)
        for (domain, _), gaps in shares.items():
            if domain in matching:
                gaps.zero_()
        return last_projection(
            stack, shares, {key: _together(parts) for key, parts in factors.items()}
        )

    def _gap(
        self, stack: ExpertStack, routing: RoutedBatch, place: int, check: RoundingCheck
    ) -> tuple[Tensor, Tensor | float]:
        """Return one batch's residual after the experts, and the factor of their output."""
        batch, everything = routing.batch, slice(None)
        state, write = self.structure, self.structure.writes[place]
        with torch.no_grad():
            output: Tensor = stack.module(routing.x, routing.chosen, routing.weights)
        factor = state.coefficient(self.merged, batch, write, everything)
        gap = state.after(self.sources[batch.domain], batch, place + 1, everything)
        gap = gap - state.after(self.merged, batch, place, everything)
        written = factor * output
        gap -= written
        terms = stack.weight("down", 0).shape[1]
        roundings = roundings_of(write) + of_experts(routing.chosen.shape[1])

        def compared(rows: slice) -> tuple[Tensor, Tensor]:
            wide = written[rows].to(gap.dtype)
            bound = of_output(wide, routing.x.dtype, terms, roundings)
            bound += state.rounding(self.merged, batch, place, rows, wide)
            return gap[rows], bound

        check.compare(batch, compared)
        return gap, factor


def _together(factors: list[Tensor | float]) -> Tensor | float:
    """Concatenate the factors of all batches: one number, or one per token."""
    tensors = [factor for factor in factors if isinstance(factor, Tensor)]
    return concatenated(tensors) if tensors else factors[0]
