"""A calibration from merged folder to calibrated folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moemerge.calibration.journal import Entry
from moemerge.calibration.layer import LayerProblem, calibrate_layer
from moemerge.calibration.output import Output, StrictError, open_output
from moemerge.calibration.prepare import CalibrationRequest, Prepared, prepare, settings_data
from moemerge.calibration.report import CalibrationReport, Timings, layer_row
from moemerge.calibration.streams import Streams, open_streams
from moemerge.calibration.warm_up import WarmUp
from moemerge.config.calibration import CalibrationSettings
from moemerge.errors import (
    ArchitectureError,
    CheckpointError,
    NumericalError,
    ResourceError,
)
from moemerge.features.router_stream import RouterStop
from moemerge.linalg.cg import Status
from moemerge.lockstep.models import PairedRouter, RouterWeights, read_router
from moemerge.routing import Curvature, DomainFeatures, Preconditioner, SolveSettings
from moemerge.routing.curvature import logits_of, working_dtype
from moemerge.runtime.devices import dtype_name
from moemerge.runtime.progress import Progress
from moemerge.runtime.timing import peak_memory
from moemerge.text.rows import source_names


def run_calibration(request: CalibrationRequest, progress: Progress) -> CalibrationReport:
    """Calibrate into `request.out`, which appears whole or not at all.

    A run that is killed or interrupted leaves a journal of its finished layers beside OUT.
    """
    start = time.perf_counter()
    with WarmUp(solve_settings(request.settings)) as warm_up:
        return _run(request, progress, warm_up, start)


def _run(
    request: CalibrationRequest, progress: Progress, warm_up: WarmUp, start: float
) -> CalibrationReport:
    prepared = prepare(request, warm_up.begin)
    for notice in prepared.notices:
        progress.note(notice)
    with open_streams(prepared, progress, warm_up.wait) as streams:
        streams.stopwatch.count("prepare", time.perf_counter() - start - prepared.text_seconds)
        streams.stopwatch.count("text", prepared.text_seconds)
        with open_output(prepared) as output:
            if request.resume:
                progress.note(f"{len(output.entries)} finished routers found, the rest is solved")
            loop = _Loop(prepared, streams, output, progress, warm_up)
            loop.run()
            solved = time.perf_counter()
            report = _report(prepared, streams, loop, solved - start)
            streams.close()  # its memory is of no more use, and writing may take a while
            output.finish(report)
    written = report.timings.written(time.perf_counter() - solved, output.copied)
    return replace(report, timings=written, seconds=time.perf_counter() - start)


class _Loop:
    """Stop, solve, replace, note: router after router."""

    def __init__(
        self,
        prepared: Prepared,
        streams: Streams,
        output: Output,
        progress: Progress,
        warm_up: WarmUp,
    ) -> None:
        self.prepared = prepared
        self.streams = streams
        self.output = output
        self.progress = progress
        self.resumed = len(output.entries)
        self.settings = solve_settings(prepared.request.settings)
        self.warm_up = warm_up
        self._begun = time.perf_counter()

    def run(self) -> None:
        left = {pair.place.weight: pair for pair in self.prepared.routers}
        for number, (stop, beside) in enumerate(self.streams):
            with self.streams.stopwatch.span("journal"):
                self.output.check()
            pair = left.pop(stop.weight_name, None)
            if pair is None:
                raise ArchitectureError(
                    f"{self.prepared.merged.label}: {stop.weight_name} is run as a router, but the "
                    "table of families knows nothing of it"
                )
            if number < self.resumed:
                entry = self._finished(number, stop)
            else:
                entry = self._solve(pair, stop, beside)
                with self.streams.stopwatch.span("journal"):
                    self.output.add(entry)
                self._tell(entry.row, len(left))
            stop.replace_router(
                entry.weight.to(self.prepared.device),
                None if entry.bias is None else entry.bias.to(self.prepared.device),
            )
        self.output.check()
        if left:
            raise ArchitectureError(
                f"{self.prepared.merged.label}: the model never ran {', '.join(sorted(left))}",
                hint="config.json and weights may not belong together",
            )

    def _finished(self, number: int, stop: RouterStop) -> Entry:
        """A router that the killed run had solved."""
        entry = self.output.entries[number]
        if entry.router != stop.weight_name:
            raise CheckpointError(
                f"{self.output.where}: entry {number} is of {entry.router}, but the model runs "
                f"{stop.weight_name} there",
                hint="the journal is damaged; start anew without --resume",
            )
        self._require_converged(entry.row)
        return entry

    def _solve(
        self, pair: PairedRouter, stop: RouterStop, beside: Mapping[str, RouterStop]
    ) -> Entry:
        begin = time.perf_counter()
        place = pair.place
        settings = self.prepared.request.settings
        with self.streams.stopwatch.span("routers"), _errors_of(place.layer):
            merged = read_router(self.prepared.merged, place)
            sources = {n: read_router(self.prepared.sources[n], p) for n, p in pair.sources.items()}
            problem = layer_problem(pair, stop, beside, merged, sources)
        with self.streams.stopwatch.span("warm-up"), _errors_of(place.layer):
            self.warm_up.wait()
        with _errors_of(place.layer):
            result = calibrate_layer(
                problem,
                self.settings,
                start=initial_router(settings.init, merged, sources),
                exact=settings.objective == "exact",
                stopwatch=self.streams.stopwatch,
            )
        row = layer_row(place.layer, place.weight, result, time.perf_counter() - begin)
        self._require_converged(row)
        for notice in row["notices"]:
            self.progress.note(notice)
        weight = merged.weight.clone()
        weight[: place.rows] = result.weight
        bias = None if merged.bias is None else merged.bias.clone()
        if bias is not None and result.bias is not None:
            bias[: place.rows] = result.bias
        return Entry(place.weight, weight, bias, row)

    def _require_converged(self, row: Mapping[str, Any]) -> None:
        """Under --strict, also of layers that a run without it had finished."""
        if self.prepared.request.settings.strict and row["status"] != Status.CONVERGED:
            raise StrictError(
                row["notices"][0],
                hint="allow more --max-steps, a larger --rtol, or leave --strict out",
            )

    def _tell(self, row: Mapping[str, Any], left: int) -> None:
        done = len(self.prepared.routers) - left - self.resumed
        seconds = (time.perf_counter() - self._begun) / max(done, 1) * left
        before, after = (_mean(row[key]) for key in ("kl_before", "kl_after"))
        residual = "?" if row["residual"] is None else f"{row['residual']:.1e}"
        self.progress.note(
            f"layer {row['layer']}: {row['iterations']} steps, residual {residual}, "
            f"KL {before:.3g} → {after:.3g}, {seconds:.0f} s left"
        )


def _mean(values: Mapping[str, float | None]) -> float:
    known = [value for value in values.values() if value is not None]
    return sum(known) / len(known) if known else float("nan")


@contextlib.contextmanager
def _errors_of(layer: int) -> Iterator[None]:
    """Errors of the mathematics name the layer; a full memory says what to change."""
    try:
        yield
    except NumericalError as error:
        raise NumericalError(f"layer {layer}: {error.message}", hint=error.hint) from error
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ResourceError(
            f"layer {layer}: out of memory while solving for its router",
            hint="lower --max-tokens, use --preconditioner jacobi, or --offload disk; "
            "--resume keeps the finished layers if settings stay the same",
        ) from error


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
    stop: RouterStop,
    beside: Mapping[str, RouterStop],
    merged: RouterWeights,
    sources: Mapping[str, RouterWeights],
) -> LayerProblem:
    """The merged model's features with every source's router, or with its own routing."""
    gate = pair.place.gate
    if gate is None:
        raise ArchitectureError(f"layer {pair.place.layer}: no gate is known for this router")
    kept: dict[bool, list[DomainFeatures]] = {False: [], True: []}
    for name, source in sources.items():
        for holdout, domains in kept.items():
            features = stop.inputs(name, holdout=holdout)
            if not features and holdout:
                continue
            router = source.matrix.to(stop.weight.device)
            targets = None
            if name in beside:
                targets = _own_logits(name, router, stop, beside[name], holdout=holdout)
            domains.append(DomainFeatures(name, features, router, targets))
    return LayerProblem(
        gate=gate,
        merged=merged.matrix.to(stop.weight.device),
        domains=kept[False],
        holdout=kept[True],
        dtypes=(merged.weight.dtype, None if merged.bias is None else merged.bias.dtype),
        selection_bias=_placed(merged.selection_bias, stop.weight.device),
        source_biases={
            name: _placed(source.selection_bias, stop.weight.device)
            for name, source in sources.items()
        },
    )


def _placed(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _own_logits(
    name: str, router: Tensor, stop: RouterStop, own: RouterStop, *, holdout: bool
) -> list[Tensor]:
    """The source's routing on its own features, token by token beside the merged model's."""
    mine = [batch for batch, _ in stop.by_batch(name, holdout=holdout)]
    theirs = own.by_batch(name, holdout=holdout) if mine else []
    assert [id(batch) for batch in mine] == [id(batch) for batch, _ in theirs]
    return [logits_of(x.to(working_dtype(x)), router) for _, x in theirs]


# --- the end ------------------------------------------------------------------------------------


def _report(prepared: Prepared, streams: Streams, loop: _Loop, seconds: float) -> CalibrationReport:
    request = prepared.request
    streams.stopwatch.aside("copy", *loop.output.copied)
    return CalibrationReport(
        merged="this run's merge" if request.passing else str(request.merged),
        output=str(request.out),
        sources={name: str(ref) for name, ref in request.sources.items()},
        data={name: source_names(request.data[name]) for name in request.sources},
        settings=settings_data(request.settings),
        device=str(prepared.device),
        dtype=dtype_name(prepared.dtype),
        offload=streams.offload,
        memory=streams.bytes_on_device,
        resumed=loop.resumed,
        layers=tuple(entry.row for entry in loop.output.entries),
        skipped=prepared.skipped,
        notices=(*prepared.notices, *(n for e in loop.output.entries for n in e.row["notices"])),
        seconds=seconds,
        timings=Timings.of(streams.stopwatch, seconds, peak_memory(prepared.device)),
    )
