"""The loop over layers: sources run a layer, then the merged model stops at each map to refit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moemerge.errors import ArchitectureError
from moemerge.features.input_hooks import UnitMap
from moemerge.features.stops import Stop
from moemerge.features.tokens import real_rows
from moemerge.lockstep.experts import ExpertMaps
from moemerge.lockstep.request import LAYERS_KEPT, errors_of
from moemerge.refitting.gradient import Training
from moemerge.refitting.layer import LayerFitter
from moemerge.refitting.least_squares import Affine, DomainScales, RidgeRule, parameter
from moemerge.refitting.linear import Inputs, fit_head
from moemerge.refitting.plan import LayerPlan, RefitPlan, Storage, stored_experts, stored_linear
from moemerge.refitting.records import AsMerged, LayerCalls, followed_batches, layer_drift
from moemerge.refitting.report import FitRow, LayerRow, MapRow, RouterRow, TrainedRow
from moemerge.refitting.routers import RouterJob
from moemerge.refitting.streams import RefitStreams
from moemerge.runtime.gpu import to_host
from moemerge.runtime.ranks import Ranks
from moemerge.runtime.timing import memory_in_use
from moemerge.text.batches import Batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedLayer:
    """A finished layer, or the head: its new tensors by name on disk, and its row of the report."""

    tensors: dict[str, Tensor]
    row: LayerRow


@dataclass
class RefitLoop:
    """Runs all layers once; `on_done` receives every finished layer that was planned."""

    streams: RefitStreams
    batches: tuple[Batch, ...]
    plan: RefitPlan
    units: UnitMap
    storage: Storage
    routers: RouterJob
    scales: DomainScales
    ridge: RidgeRule
    ranks: Ranks
    on_done: Callable[[FinishedLayer], None]
    before_fits: Callable[[], None] = lambda: (
        None
    )  # waits for work that must not overlap with a fit
    done_before: Collection[int] = ()  # layers that a killed run had finished
    experts: ExpertMaps = field(default_factory=dict)  # of sources with more experts
    training: Training | None = None  # None: maps are fitted in closed form
    _fitter: LayerFitter | None = None
    _rows: list[FitRow] = field(default_factory=list)
    _tensors: dict[str, Tensor] = field(default_factory=dict)  # routers of the layer at hand
    _left: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._followed = followed_batches(self.batches)
        self._as_merged = AsMerged(
            layers=frozenset(self.streams.merged.stream.anatomy.layers),
            batches={id(batch) for batch in self._followed},
            copies=self.streams.merged.recorder.copies,
        )
        self._calls = LayerCalls(frozenset(self.streams.merged.stream.anatomy.layers))

    def run(self) -> None:
        merged = self.streams.merged.stream
        merged.stop_before(
            [path for layer in self._planned for path in layer.pauses],
        )
        merged.listen(merged.anatomy.layers, self._as_merged.on_calls)
        if self.training is not None:
            merged.listen(merged.anatomy.layers, self._calls.on_calls)
        for runner in self.streams.sources.values():
            runner.run_layer()  # up to the first layer
        for stop in merged:
            if stop.kind == "module":
                self.before_fits()
                with _errors_of(f"layer {stop.layer}"):
                    self._fit(stop)
                continue
            with merged.stopwatch.span("store"):
                self._finish_layer()
            if stop.kind == "end":
                self.streams.drop_layers()
                with merged.stopwatch.span("fit the head"), _errors_of("the head"):
                    self._head()
            else:
                self._begin_layer(self.plan.layers[stop.layer], stop)

    @property
    def _planned(self) -> list[LayerPlan]:
        return [layer for layer in self.plan.layers if layer.number not in self.done_before]

    def _begin_layer(self, plan: LayerPlan, stop: Stop) -> None:
        if plan.number in self.done_before:
            plan = plan.without_maps()
        recorded = plan if self.training is None else plan.without_maps()
        structure = self.streams.begin_layer(recorded, stop)
        self._left = set(plan.pauses)
        self._fitter = LayerFitter(
            plan=plan,
            structure=structure,
            merged=self.streams.merged.view(),
            sources={name: runner.view() for name, runner in self.streams.sources.items()},
            scales=self.scales,
            ridge=self.ridge,
            stored=self._stored,
            storage=self.storage,
            ranks=self.ranks,
            experts=self.experts,
        )

    def _fit(self, stop: Stop) -> None:
        fitter = self._fitter
        assert fitter is not None
        first = len(self._left) == len(fitter.plan.pauses)  # nothing of this layer has moved yet
        if first:
            self._run_as_merged(fitter.plan)
        self.streams.merged.stream.give_back()
        self._left.discard(stop.path)
        stopwatch = self.streams.merged.stream.stopwatch
        self._log_memory(stop)
        if self.training is not None:
            if first:  # every map that is trained runs after this stop
                with stopwatch.span("train"):
                    self._train(self.training, fitter.plan)
            return
        if stop.path in fitter.plan.routers:
            with stopwatch.span("fit routers"):
                self._fit_router(fitter, stop)
            return
        with stopwatch.span("fit experts" if stop.path in fitter.plan.experts else "fit maps"):
            self._rows += fitter.fit(stop)

    def _log_memory(self, stop: Stop) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            memory = memory_in_use(self.streams.merged.stream.device)
            if memory is not None:
                held, most = (nbytes / 1e9 for nbytes in memory)
                logger.debug("%s: %.1f GB held, %.1f GB at the most so far", stop.path, held, most)

    def _fit_router(self, fitter: LayerFitter, stop: Stop) -> None:
        router = fitter.plan.routers[stop.path]
        fit, tensors = self.routers.fit(stop, router.info, fitter.sources)
        fitter.forget(stop.path)
        for there, name in (
            (router.module.weight, router.info.weight),
            (router.module.bias, router.info.bias),
        ):
            if there is not None and name is not None:
                target = parameter(self.streams.merged.model, there)
                target.copy_(tensors[name].reshape(target.shape))
        self._tensors.update(tensors)
        self._rows.append(RouterRow(router.info.weight, fit))

    def _train(self, training: Training, plan: LayerPlan) -> None:
        model = self.streams.merged.model
        routers = [router.module.weight for router in plan.routers.values()]
        experts = [name for hook in plan.experts.values() for name in (hook.up, hook.down)]
        names = [*(hook.weight for hook in plan.linear.values()), *experts, *routers]
        trained = {model.get_parameter(name): self._stored(name) for name in dict.fromkeys(names)}
        fit, rate = training.layer(
            model.get_submodule(plan.path),
            trained,
            self._calls,
            self.batches,
            self.streams.source_record,
            plan.number,
        )
        self._rows.append(TrainedRow(plan.path, "hidden state", fit, rate))
        checkpoint = self.streams.merged.stream.checkpoint
        for router in plan.routers.values():
            for there, name in (
                (router.module.weight, router.info.weight),
                (router.module.bias, router.info.bias),
            ):
                if there is not None and name is not None:
                    info = checkpoint.tensors[name]
                    value = to_host(parameter(model, there)).reshape(info.shape)
                    self._tensors[name] = value.to(info.dtype.torch)

    def _run_as_merged(self, plan: LayerPlan) -> None:
        self._as_merged.run(self.streams.merged.model.get_submodule(plan.path))

    # --- finished layers ---

    def _finish_layer(self) -> None:
        fitter, self._fitter = self._fitter, None
        if fitter is None:
            return
        if not fitter.plan.pauses:
            self._run_as_merged(fitter.plan)
            return
        self._require_all_ran(fitter)
        rows, self._rows = self._rows, []
        merged = self.streams.merged.recorder.records
        source = self.streams.source_record
        device = self.streams.merged.stream.device

        def as_merged(batch: Batch) -> Tensor | None:
            return self._as_merged.states(batch, real_rows(batch, device))

        def drift(states: Callable[[Batch], Tensor | None]) -> dict[str, float]:
            return layer_drift(self._followed, states, source, self.ranks)

        row = LayerRow(
            layer=fitter.plan.number,
            rows=tuple(rows),
            drift_before=drift(as_merged),
            drift_after=drift(lambda batch: merged[id(batch)].left),
            notices=tuple(fitter.notices),
        )
        self.on_done(FinishedLayer(self._stored_tensors(fitter.plan), row))
        self._log_times(fitter.plan.number)

    def _log_times(self, layer: int) -> None:
        if logger.isEnabledFor(logging.DEBUG):  # it waits for the device
            parts = self.streams.merged.stream.stopwatch.totals().items()
            spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts)
            logger.debug("layer %d is done; so far %s", layer, spent)

    def _require_all_ran(self, fitter: LayerFitter) -> None:
        # The model's code reads some matrices without calling their module: nothing stops there.
        never = self._left & fitter.structure.called
        if never:
            raise ArchitectureError(
                f"{self.streams.merged.stream.checkpoint.label}: the model never ran "
                f"{', '.join(sorted(never))}",
                hint="config.json and weights may not belong together",
            )
        fitter.notices += [
            f"layer {fitter.plan.number}: {path} is not called as a module, so it is not refitted"
            for path in sorted(self._left)
        ]

    def _stored_tensors(self, plan: LayerPlan) -> dict[str, Tensor]:
        stream = self.streams.merged.stream
        tensors, self._tensors = self._tensors, {}
        if not self.ranks.leads:
            return {}  # rank 0 writes
        for hook in plan.linear.values():
            weight = parameter(stream.model, hook.weight)
            tensors.update(stored_linear(stream.checkpoint, self.units.linear(hook), weight))
        for path, experts in plan.experts.items():
            units, module = self.units.experts(experts), stream.model.get_submodule(path)
            stored_experts(stream.checkpoint, units, module, experts, tensors)
        return tensors

    # --- the head ---

    def _head(self) -> None:
        head = self.plan.head
        if head is None:
            return
        affines = {
            name: Affine(runner.stream.weights.fetch([head.weight])[head.weight], None)
            for name, runner in (("", self.streams.merged), *self.streams.sources.items())
        }
        final = self.streams.merged.final.values
        theirs: dict[int, Tensor] = {}
        for runner in self.streams.sources.values():
            theirs.update(runner.final.values)
        row: MapRow
        if self.training is not None:
            weight, fit, rate = self.training.head(
                affines.pop("").weight,
                self._stored(head.weight),
                affines,
                self.batches,
                final,
                theirs,
            )
            row = TrainedRow(head.weight, "distribution", fit, rate)
        else:
            weight, fit = fit_head(
                affines.pop(""),
                affines,
                Inputs(self.batches, [final[id(batch)] for batch in self.batches]),
                theirs,
                self.scales,
                self.ridge,
                self._stored(head.weight),
                self.ranks,
            )
            row = MapRow(head.weight, "output", fit)
        checkpoint = self.streams.merged.stream.checkpoint
        tensors = stored_linear(checkpoint, self.units.linear(head), weight)
        self.on_done(FinishedLayer(tensors, LayerRow(None, (row,), {}, {}, ())))

    def _stored(self, name: str) -> torch.dtype:
        """Return the dtype of a parameter on disk."""
        stream = self.streams.merged.stream
        recipe = stream.names.recipes[name]
        return stream.checkpoint.tensors[recipe.sources[0][1]].dtype.torch


def _errors_of(where: str) -> AbstractContextManager[None]:
    remedy = f'lower `max_tokens`, or use `offload="disk"`; {LAYERS_KEPT}'
    return errors_of(where, "while its maps were refitted", remedy)
