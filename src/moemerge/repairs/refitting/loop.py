"""The loop over layers: sources run a layer, then the merged model stops at each map to refit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from moemerge.errors import ArchitectureError
from moemerge.forward.input_hooks import UnitMap
from moemerge.forward.stops import Stop
from moemerge.forward.tokens import real_rows
from moemerge.repairs.lockstep.job import RepairRun
from moemerge.repairs.lockstep.journal import Entry
from moemerge.repairs.lockstep.output import RefusedResultError
from moemerge.repairs.lockstep.request import LAYERS_KEPT, errors_of
from moemerge.repairs.refitting.experts import ExpertStack
from moemerge.repairs.refitting.gradient import Training
from moemerge.repairs.refitting.job import RefitJob
from moemerge.repairs.refitting.layer import LayerFitter
from moemerge.repairs.refitting.least_squares import Affine, RidgeRule, parameter
from moemerge.repairs.refitting.linear import Inputs, fit_head
from moemerge.repairs.refitting.plan import LayerPlan, RefitPlan, Storage
from moemerge.repairs.refitting.records import AsMerged, LayerCalls, followed_batches, layer_drift
from moemerge.repairs.refitting.report import (
    Row,
    kind_of,
    layer_row,
    map_row,
    matches_sources,
    progress_of,
    router_row,
    trained_row,
)
from moemerge.repairs.refitting.routers import refit_router
from moemerge.repairs.refitting.streams import RefitStreams
from moemerge.routing.cg import Status
from moemerge.runtime.gpu import to_host
from moemerge.runtime.progress import TimeLeft
from moemerge.runtime.timing import memory_in_use
from moemerge.text.batches import Batch

logger = logging.getLogger(__name__)


HEAD = "head"


class RefitLoop:
    """Runs all layers once, and adds an entry to the output for each that was planned."""

    def __init__(
        self, job: RefitJob, run: RepairRun, streams: RefitStreams, plan: RefitPlan, units: UnitMap
    ) -> None:
        self.job = job
        self.context = run
        self.streams = streams
        self.plan = plan
        merged, settings = streams.merged, job.request.settings
        same = settings.requantize == "same"
        self.storage = Storage(job.merged.checkpoint, units, merged.stream.names, same)
        self.ridge = RidgeRule(job.ridge)
        self.training: Training | None = None  # None: maps are fitted in closed form
        if job.by_gradient:
            self.training = Training(settings.steps, settings.seed, job.weights, job.ranks)
        self._done_before: set[int] = set()  # layers that a killed run had finished
        self._time_left = TimeLeft(sum(bool(layer.pauses) for layer in plan.layers))
        self._fitter: LayerFitter | None = None
        self._rows: list[Row] = []
        self._tensors: dict[str, Tensor] = {}  # routers of the layer at hand
        self._left: set[str] = set()
        layers = frozenset(merged.stream.anatomy.layers)
        self._followed = followed_batches(job.batches)
        followed = {id(batch) for batch in self._followed}
        self._as_merged = AsMerged(layers, followed, merged.recorder.copies)
        self._calls = LayerCalls(layers)

    def resume(self) -> dict[str, Callable[[], Tensor]]:
        """Return the new tensors of the layers that a killed run had finished."""
        tensors: dict[str, Callable[[], Tensor]] = {}
        for layer in self.plan.layers:
            if not layer.pauses:
                continue
            entry = self.context.output.finished(f"layer {layer.number}")
            if entry is None:
                break
            tensors.update({n: partial(entry.tensors.__getitem__, n) for n in entry.tensors})
            self._refuse_if_strict(entry.row)
            self._search_from(entry.row["maps"])
            self._done_before.add(layer.number)
            self._time_left.skip()
        if self._done_before:
            finished = len(self._done_before)
            self.context.progress.note(f"resuming a killed run: {finished} layers are finished")
        return tensors

    def _search_from(self, maps: Sequence[Row]) -> None:
        """Begin the next searches for λ or the rate at those of a finished layer's report.

        A resumed run has nothing else, and a reported λ may be larger than the chosen one.
        """
        self.ridge.last.update({kind_of(m): m["ridge"] for m in maps if "ridge" in m})
        if self.training is not None:
            self.training.rate = maps[0]["rate"]

    def run(self) -> None:
        merged = self.streams.merged.stream
        left = (one for one in self.plan.layers if one.number not in self._done_before)
        merged.stop_before([path for layer in left for path in layer.pauses])
        merged.listen(merged.anatomy.layers, self._as_merged.on_calls)
        if self.training is not None:
            merged.listen(merged.anatomy.layers, self._calls.on_calls)
        for runner in self.streams.sources.values():
            runner.run_layer()  # up to the first layer
        for stop in merged:
            if stop.kind == "module":
                self.context.warm_up.wait()
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

    def _begin_layer(self, plan: LayerPlan, stop: Stop) -> None:
        if plan.number in self._done_before:
            plan = plan.without_maps()
        recorded = plan if self.training is None else plan.without_maps()
        structure = self.streams.begin_layer(recorded, stop)
        self._left = set(plan.pauses)
        self._fitter = LayerFitter(
            plan=plan,
            structure=structure,
            merged=self.streams.merged.view(),
            sources={name: runner.view() for name, runner in self.streams.sources.items()},
            job=self.job,
            ridge=self.ridge,
            storage=self.storage,
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
        fit, tensors = refit_router(self.job, stop, router.info, fitter.sources)
        fitter.forget(stop.path)
        for here, name in router.names.items():
            target = parameter(self.streams.merged.model, here)
            target.copy_(tensors[name].reshape(target.shape))
        self._tensors.update(tensors)
        self._rows.append(router_row(router.info.weight, fit))

    def _train(self, training: Training, plan: LayerPlan) -> None:
        model = self.streams.merged.model
        routers = [router.module.weight for router in plan.routers.values()]
        experts = [name for hook in plan.experts.values() for name in (hook.up, hook.down)]
        names = [*(hook.weight for hook in plan.linear.values()), *experts, *routers]
        trained = {model.get_parameter(n): self.storage.dtype(n) for n in dict.fromkeys(names)}
        fit, rate = training.layer(
            model.get_submodule(plan.path),
            trained,
            self._calls,
            self.job.batches,
            self.streams.source_record,
            plan.number,
        )
        self._rows.append(trained_row(plan.path, "hidden state", fit, rate))
        for router in plan.routers.values():
            for here, name in router.names.items():
                info = self.storage.checkpoint.tensors[name]
                value = to_host(parameter(model, here)).reshape(info.shape)
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
            return layer_drift(self._followed, states, source, self.job.ranks)

        row = layer_row(
            fitter.plan.number,
            rows,
            drift(as_merged),
            drift(lambda batch: merged[id(batch)].left),
            fitter.notices,
        )
        self._search_from(row["maps"])
        name, left = f"layer {fitter.plan.number}", self._time_left.step()
        self._add(name, self._stored_tensors(fitter.plan), row, left)
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
        model = self.streams.merged.model
        tensors, self._tensors = self._tensors, {}
        if not self.job.ranks.leads:
            return {}  # rank 0 writes
        for hook in plan.linear.values():
            self.storage.write(self.storage.linear(hook), parameter(model, hook.weight), tensors)
        for path, experts in plan.experts.items():
            stack = ExpertStack(model.get_submodule(path), experts)
            for (which, expert), parts in self.storage.experts(experts, stack.module).items():
                self.storage.write(parts, stack.weight(which, expert), tensors)
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
        stored, final = self.storage.dtype(head.weight), self.streams.merged.final
        theirs: dict[int, Tensor] = {}
        for runner in self.streams.sources.values():
            theirs.update(runner.final)
        if self.training is not None:
            weight, fit, rate = self.training.head(
                affines.pop("").weight, stored, affines, self.job.batches, final, theirs
            )
            row = trained_row(head.weight, "distribution", fit, rate)
        else:
            batches = self.job.batches
            inputs = Inputs(batches, [final[id(batch)] for batch in batches])
            weight, fit = fit_head(
                self.job, affines.pop(""), affines, inputs, theirs, self.ridge, stored
            )
            row = map_row(head.weight, "output", fit)
        tensors: dict[str, Tensor] = {}
        self.storage.write(self.storage.linear(head), weight, tensors)
        self._add(HEAD, tensors, layer_row(None, [row], {}, {}, []))

    # --- entries ---

    def _add(self, name: str, tensors: dict[str, Tensor], row: Row, left: str = "") -> None:
        self.context.output.check()
        self._refuse_if_strict(row)
        for notice in row["notices"]:
            self.context.progress.note(notice)
        self.context.progress.note(f"{name}{progress_of(row)}{left}")
        self.context.output.add(Entry(name, tensors, row))

    def _refuse_if_strict(self, row: Mapping[str, Any]) -> None:
        """With `strict`, refuse kept maps, also of layers that a run without it had finished."""
        if self.job.request.settings.strict and row["notices"]:
            bad = [m for m in row["maps"] if m.get("status", Status.CONVERGED) != Status.CONVERGED]
            kept = [m for m in row["maps"] if m["kept"] is True and not matches_sources(m)]
            if bad or kept:
                raise RefusedResultError(
                    row["notices"][0], hint="give more text, or leave `strict` out"
                )


def _errors_of(where: str) -> AbstractContextManager[None]:
    remedy = f'lower `max_tokens`, or use `offload="disk"`; {LAYERS_KEPT}'
    return errors_of(where, "while its maps were refitted", remedy)
