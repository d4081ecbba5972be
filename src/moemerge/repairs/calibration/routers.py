"""Calibrate each router: from the stopped models to new tensors and a row of the report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from moemerge.config.repair_settings import CalibrationSettings
from moemerge.errors import ArchitectureError, NumericalError
from moemerge.forward.router_stream import RouterStop
from moemerge.repairs.calibration.job import CalibrationJob
from moemerge.repairs.calibration.layer import calibrate_layer
from moemerge.repairs.calibration.report import layer_row
from moemerge.repairs.lockstep.job import RepairRun
from moemerge.repairs.lockstep.journal import Entry
from moemerge.repairs.lockstep.models import MERGED, PairedRouter, RouterWeights
from moemerge.repairs.lockstep.output import RefusedResultError
from moemerge.repairs.lockstep.request import LAYERS_KEPT, errors_of
from moemerge.repairs.lockstep.streams import Stops, Visitor
from moemerge.routing import Curvature, DomainFeatures, Preconditioner, RouterProblem, SolveSettings
from moemerge.routing.cg import Status
from moemerge.runtime.progress import TimeLeft, counted
from moemerge.runtime.ranks import Ranks
from moemerge.runtime.timing import Stopwatch


class RouterCalibrator(Visitor):
    """Solves for every router that the models stop at."""

    def __init__(self, job: CalibrationJob, run: RepairRun, stopwatch: Stopwatch) -> None:
        self._job = job
        self._settings = job.request.settings
        self._stopwatch = stopwatch
        self._warm_up = run.warm_up
        self._progress = run.progress
        self._time_left = TimeLeft(len(job.routers.pairs))

    def visit(self, pair: PairedRouter, stops: Stops) -> Entry:
        """Solve for the router that all models stopped at."""
        begin = time.perf_counter()
        info, stored = pair.info, self._job.stored
        with self._stopwatch.span("routers"), _errors_of(info.layer):
            merged = stored[MERGED].weights(info)
            sources = {
                name: stored[name].weights(other, pair.experts.get(name))
                for name, other in pair.sources.items()
            }
            problem = layer_problem(
                pair, stops, merged, sources, self._job.weights, self._job.ranks
            )
        with self._stopwatch.span("warm-up"), _errors_of(info.layer):
            self._warm_up.wait()
        with _errors_of(info.layer):
            result = calibrate_layer(
                problem,
                solve_settings(self._settings),
                start=initial_router(self._settings.init, merged, sources),
                exact=self._settings.objective == "exact",
                stopwatch=self._stopwatch,
            )
        row = layer_row(info.layer, info.weight, result, time.perf_counter() - begin)
        if row["status"] == Status.NON_FINITE:
            raise NumericalError(
                f"layer {info.layer}: solving for {info.weight} gave values that are not finite",
                hint="`gamma` or a router's weights are too large",
            )
        tensors = merged.updated(self._job.merged, info, result.weight, result.bias)
        entry = Entry(info.weight, tensors, row)
        for notice in row["notices"]:
            self._progress.note(notice)
        self._require_converged(entry)
        return entry

    def resumed(self, entry: Entry) -> None:
        """Apply `strict` to routers that an earlier run without it had finished."""
        self._time_left.skip()
        self._require_converged(entry)

    def _require_converged(self, entry: Entry) -> None:
        if self._settings.strict and entry.row["status"] != Status.CONVERGED:
            raise RefusedResultError(
                entry.row["notices"][0],
                hint="allow more `max_steps`, a larger `rtol`, or leave `strict` out",
            )

    def added(self, entry: Entry) -> None:
        row = entry.row
        before, after = (_mean(row[key]) for key in ("kl_before", "kl_after"))
        residual = "?" if row["residual"] is None else f"{row['residual']:.1e}"
        newton = counted(row["exact"]["steps"], "Newton step") + ", " if "exact" in row else ""
        self._progress.note(
            f"layer {row['layer']}: {counted(row['iterations'], 'step')}, residual {residual}, "
            f"{newton}KL {before:.3g} → {after:.3g}{self._time_left.step()}"
        )


def _mean(values: Mapping[str, float | None]) -> float:
    known = [value for value in values.values() if value is not None]
    return sum(known) / len(known) if known else math.nan


def _errors_of(layer: int) -> AbstractContextManager[None]:
    return errors_of(
        f"layer {layer}",
        "while solving for its router",
        f'lower `max_tokens`, use `preconditioner="jacobi"`, or `offload="disk"`; {LAYERS_KEPT}',
    )


def solve_settings(settings: CalibrationSettings) -> SolveSettings:
    return SolveSettings(
        alpha=settings.alpha,
        gamma=settings.gamma,
        curvature=Curvature(settings.curvature),
        preconditioner=Preconditioner(settings.preconditioner),
        rtol=settings.rtol,
        max_steps=settings.max_steps,
    )


def initial_router(
    kind: str, merged: RouterWeights, sources: Mapping[str, RouterWeights]
) -> Tensor:
    """Return the router that the solver starts from, (K, d [+ 1]) float64."""
    if kind == "zero":
        return torch.zeros_like(merged.matrix)
    if kind == "average":
        return torch.stack([source.matrix for source in sources.values()]).mean(dim=0)
    return merged.matrix


def layer_problem(
    pair: PairedRouter,
    stops: Stops,
    merged: RouterWeights,
    sources: Mapping[str, RouterWeights],
    weights: Mapping[str, float],
    ranks: Ranks,
) -> RouterProblem:
    """Pair the merged model's features with each source's router, or with its own routing."""
    gate, stop = pair.info.gate, stops.lead
    if gate is None:
        raise ArchitectureError(f"layer {pair.info.layer}: no gate is known for this router")
    device = stop.weight.device
    kept: dict[bool, list[DomainFeatures]] = {False: [], True: []}
    for name, source in sources.items():
        for holdout, domains in kept.items():
            features = stop.inputs(name, holdout=holdout)
            if not features and holdout:
                continue
            router = source.matrix.to(device)
            targets, logits = None, source.logits_on(device, gate)
            if name in stops.others:
                own = _own_features(name, stop, stops.others[name], holdout=holdout)
                targets = [logits(x) for x in own]
            elif not source.is_linear:
                targets = [logits(x) for x in features]
            domains.append(DomainFeatures(name, features, router, targets, weights[name], ranks))
    return RouterProblem(
        gate=gate,
        merged=merged.matrix.to(device),
        domains=kept[False],
        holdout=kept[True],
        dtypes=(merged.weight.dtype, None if merged.bias is None else merged.bias.dtype),
        selection_bias=_moved(merged.selection_bias, device),
        source_biases={
            name: _moved(source.selection_bias, device) for name, source in sources.items()
        },
    )


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _own_features(name: str, stop: RouterStop, own: RouterStop, *, holdout: bool) -> list[Tensor]:
    """Return a source's own features, token by token as the merged model's."""
    mine = [batch for batch, _ in stop.by_batch(name, holdout=holdout)]
    theirs = own.by_batch(name, holdout=holdout) if mine else []
    assert [id(batch) for batch in mine] == [id(batch) for batch, _ in theirs]
    return [x for _, x in theirs]
