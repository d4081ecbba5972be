"""One router: from the models that wait at it to its new tensors and its row of the report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from moemerge.architectures.rules import Score
from moemerge.calibration.job import CalibrationJob
from moemerge.calibration.layer import LayerProblem, calibrate_layer
from moemerge.calibration.report import layer_row
from moemerge.config.calibration import CalibrationSettings
from moemerge.errors import ArchitectureError, NumericalError
from moemerge.features.router_stream import RouterStop
from moemerge.linalg.cg import Status
from moemerge.lockstep.journal import Entry
from moemerge.lockstep.models import MERGED, PairedRouter, RouterWeights
from moemerge.lockstep.output import RefusedResultError
from moemerge.lockstep.repairs import errors_of
from moemerge.lockstep.streams import Need, Stops
from moemerge.lockstep.walk import Visitor
from moemerge.lockstep.warm_up import WarmUp
from moemerge.routing import Curvature, DomainFeatures, Preconditioner, SolveSettings
from moemerge.routing.curvature import logits_of, rows_at_once, working_dtype
from moemerge.routing.preconditioners import matrix_bytes
from moemerge.runtime.progress import Progress, counted
from moemerge.runtime.timing import Stopwatch

# Vectors of the solver, preconditioner's scales, measured routers: all (K, d) in float64.
ROUTER_COPIES = 16


class RouterSolver(Visitor):
    """Visits routers and solves for them."""

    def __init__(
        self, job: CalibrationJob, stopwatch: Stopwatch, warm_up: WarmUp, progress: Progress
    ) -> None:
        self._job = job
        self._settings = job.request.settings
        self._stopwatch = stopwatch
        self._warm_up = warm_up
        self._progress = progress
        self._left = len(job.routers.pairs)
        self._solved = 0
        self._begun = time.perf_counter()

    def visit(self, pair: PairedRouter, stops: Stops) -> Entry:
        """Solve for the router that all models wait at."""
        begin = time.perf_counter()
        info, stored = pair.info, self._job.stored
        with self._stopwatch.span("routers"), _errors_of(info.layer):
            merged = stored[MERGED].weights(info)
            sources = {name: stored[name].weights(other) for name, other in pair.sources.items()}
            problem = layer_problem(pair, stops, merged, sources, self._job.weights)
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
                hint="`gamma` or a router's weights are too large for these numbers",
            )
        entry = Entry(info.weight, self._tensors(pair, merged, result.weight, result.bias), row)
        for notice in row["notices"]:
            self._progress.note(notice)
        self._require_converged(entry)
        return entry

    def _tensors(
        self, pair: PairedRouter, merged: RouterWeights, weight: Tensor, bias: Tensor | None
    ) -> dict[str, Tensor]:
        """As they will be stored: rows that are no logits of experts stay as merged."""
        info, tensors = pair.info, self._job.merged.checkpoint.tensors
        whole = {info.weight: merged.weight.clone()}
        whole[info.weight][: info.rows] = weight
        if info.bias is not None and merged.bias is not None and bias is not None:
            flat = merged.bias.clone()
            flat[: info.rows] = bias
            whole[info.bias] = flat.reshape(tensors[info.bias].shape)
        return whole

    def resumed(self, entry: Entry) -> None:
        """`strict` also counts for routers that a run without it had finished."""
        self._left -= 1
        self._require_converged(entry)

    def _require_converged(self, entry: Entry) -> None:
        if self._settings.strict and entry.row["status"] != Status.CONVERGED:
            raise RefusedResultError(
                entry.row["notices"][0],
                hint="allow more `max_steps`, a larger `rtol`, or leave `strict` out",
            )

    def added(self, entry: Entry) -> None:
        row = entry.row
        self._left -= 1
        self._solved += 1
        seconds = (time.perf_counter() - self._begun) / self._solved * self._left
        before, after = (_mean(row[key]) for key in ("kl_before", "kl_after"))
        residual = "?" if row["residual"] is None else f"{row['residual']:.1e}"
        self._progress.note(
            f"layer {row['layer']}: {counted(row['iterations'], 'step')}, residual {residual}, "
            f"KL {before:.3g} → {after:.3g}, {seconds:.0f} s left"
        )


def _mean(values: Mapping[str, float | None]) -> float:
    known = [value for value in values.values() if value is not None]
    return sum(known) / len(known) if known else math.nan


def _errors_of(layer: int) -> AbstractContextManager[None]:
    return errors_of(
        f"layer {layer}",
        "while solving for its router",
        'lower `max_tokens`, use `preconditioner="jacobi"`, or `offload="disk"`',
    )


# --- one layer's problem ------------------------------------------------------------------------


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
    """Where the solver starts, (K, d [+ 1]) float64."""
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
) -> LayerProblem:
    """The merged model's features with every source's router, or with its own routing."""
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
            targets = None
            if name in stops.others:
                targets = _own_logits(name, router, stop, stops.others[name], holdout=holdout)
            domains.append(DomainFeatures(name, features, router, targets, weights[name]))
    return LayerProblem(
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


def _own_logits(
    name: str, router: Tensor, stop: RouterStop, own: RouterStop, *, holdout: bool
) -> list[Tensor]:
    """The source's routing on its own features, token by token beside the merged model's."""
    mine = [batch for batch, _ in stop.by_batch(name, holdout=holdout)]
    theirs = own.by_batch(name, holdout=holdout) if mine else []
    assert [id(batch) for batch in mine] == [id(batch) for batch, _ in theirs]
    return [logits_of(x.to(working_dtype(x)), router) for _, x in theirs]


# --- memory -------------------------------------------------------------------------------------


def memory_need(job: CalibrationJob) -> Need:
    """What solving holds beside the streams, and what would make it fit."""
    settings = job.request.settings
    hints = ["lower `max_tokens` or `max_length`"]
    if job.streams_sources:
        hints.append('`targets="merged-features"` holds the layers of one model instead of all')
    if settings.preconditioner not in ("none", "jacobi"):
        hints.append('`preconditioner="jacobi"` holds no matrices')
    if job.stream.dtype == torch.float32:
        hints.append('`dtype="bfloat16"` halves a layer')
    return Need("calibration", solver_bytes(job), hints)


def solver_bytes(job: CalibrationJob) -> int:
    """What the largest router's solve holds beside the features: H, targets, preconditioner."""
    tokens = sum(domain.tokens for domain in job.text.domains)
    settings = job.request.settings
    working = torch.float64 if job.stream.dtype == torch.float64 else torch.float32
    largest = 0
    for pair in job.routers.pairs:
        width = job.merged.checkpoint.tensors[pair.info.weight].shape[1]
        experts, gate = pair.info.rows, pair.info.gate
        rows = 0 if settings.curvature == "identity" else 1  # (tokens, K) held in float32
        if rows and gate is not None and gate.score is not Score.SOFTMAX:
            rows += 1
        rows += settings.targets == "source-features"
        rows += 3 * (settings.objective == "exact")
        chunk = min(tokens, rows_at_once(job.stream.device)) * (width + 4 * experts)
        kind = Preconditioner(settings.preconditioner)
        largest = max(
            largest,
            4 * rows * tokens * experts
            + 8 * (chunk + ROUTER_COPIES * experts * width)
            + matrix_bytes(kind, (experts, width), tokens, working),
        )
    return largest
