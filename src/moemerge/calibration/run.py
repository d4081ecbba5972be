"""A calibration from merged folder to calibrated folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.calibration.journal import Entry, Journal
from moemerge.calibration.layer import LayerProblem, calibrate_layer
from moemerge.calibration.prepare import CalibrationRequest, Prepared, prepare, settings_data
from moemerge.calibration.provenance import output_files
from moemerge.calibration.report import CalibrationReport, layer_row
from moemerge.calibration.streams import Streams, open_streams
from moemerge.checkpoint import CheckpointPatch
from moemerge.errors import (
    ArchitectureError,
    DataError,
    NumericalError,
    ResourceError,
    UsageError,
)
from moemerge.features.stops import RouterStop
from moemerge.linalg.cg import Status
from moemerge.lockstep.models import PairedRouter, RouterTensors, read_router
from moemerge.routing import Curvature, Domain, Preconditioner, SolveSettings
from moemerge.routing.curvature import logits_of, working_dtype
from moemerge.runtime.devices import dtype_name
from moemerge.runtime.progress import Progress
from moemerge.version import __version__

# After these a second attempt would end the same: what is finished is of no use.
HOPELESS = (ArchitectureError, DataError, NumericalError, UsageError)


def run_calibration(request: CalibrationRequest, progress: Progress) -> CalibrationReport:
    """Calibrate into `request.out`, which appears whole or not at all.

    A run that is killed or interrupted leaves a journal of its finished layers beside OUT.
    """
    start = time.perf_counter()
    prepared = prepare(request)
    for notice in prepared.notices:
        progress.note(notice)
    with open_streams(prepared, progress) as streams:
        journal = Journal.open(request.out, prepared.key, resume=request.resume)
        if request.resume:
            progress.note(f"{len(journal.entries)} finished routers found, the rest is solved")
        try:
            loop = _Loop(prepared, streams, journal, progress)
            loop.run()
            report = _report(prepared, streams, loop, time.perf_counter() - start)
            _write(prepared, journal, report)
        except HOPELESS:
            journal.remove()
            raise
        except BaseException:
            journal.close()
            raise
    journal.remove()
    return report


class _Loop:
    """Stop, solve, replace, note: router after router."""

    def __init__(
        self, prepared: Prepared, streams: Streams, journal: Journal, progress: Progress
    ) -> None:
        self.prepared = prepared
        self.streams = streams
        self.journal = journal
        self.progress = progress
        self.resumed = len(journal.entries)
        self.settings = solve_settings(prepared)
        self._begun = time.perf_counter()

    def run(self) -> None:
        left = {pair.place.weight: pair for pair in self.prepared.routers}
        for number, (stop, beside) in enumerate(self.streams):
            pair = left.pop(stop.weight_name, None)
            if pair is None:
                raise ArchitectureError(
                    f"{self.prepared.merged.label}: {stop.weight_name} is run as a router, but the "
                    "table of families knows nothing of it"
                )
            if number < self.resumed:
                entry = self.journal.entries[number]
                self._require_converged(entry.row)
            else:
                entry = self._solve(pair, stop, beside)
                self.journal.add(entry)
                self._tell(entry.row, len(left))
            stop.replace(
                entry.weight.to(self.prepared.device),
                None if entry.bias is None else entry.bias.to(self.prepared.device),
            )
        if left:
            raise ArchitectureError(
                f"{self.prepared.merged.label}: the model never ran {', '.join(sorted(left))}",
                hint="config.json and weights may not belong together",
            )

    def _solve(
        self, pair: PairedRouter, stop: RouterStop, beside: Mapping[str, RouterStop]
    ) -> Entry:
        begin = time.perf_counter()
        place = pair.place
        settings = self.prepared.request.settings
        merged = read_router(self.prepared.merged, place)
        sources = {n: read_router(self.prepared.sources[n], p) for n, p in pair.sources.items()}
        with _errors_of(place.layer):
            problem = layer_problem(pair, stop, beside, merged, sources)
            result = calibrate_layer(
                problem,
                self.settings,
                start=initial_router(settings.init, merged, sources),
                exact=settings.objective == "exact",
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
            raise NumericalError(
                row["notices"][0],
                hint="allow more --max-steps, a larger --rtol, or leave --strict out",
            )

    def _tell(self, row: Mapping[str, Any], left: int) -> None:
        done = len(self.journal.entries) - self.resumed
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


def solve_settings(prepared: Prepared) -> SolveSettings:
    settings = prepared.request.settings
    return SolveSettings(
        alpha=settings.alpha,
        gamma=settings.gamma,
        curvature=Curvature(settings.curvature),
        preconditioner=Preconditioner(settings.preconditioner),
        rtol=settings.rtol,
        max_steps=settings.max_steps,
    )


def initial_router(
    kind: str, merged: RouterTensors, sources: Mapping[str, RouterTensors]
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
    merged: RouterTensors,
    sources: Mapping[str, RouterTensors],
) -> LayerProblem:
    """The merged model's features with every source's router, or with its own routing."""
    gate = pair.place.gate
    if gate is None:
        raise ArchitectureError(f"layer {pair.place.layer}: no gate is known for this router")
    kept: dict[bool, list[Domain]] = {False: [], True: []}
    for name, source in sources.items():
        for holdout, domains in kept.items():
            features = stop.inputs(name, holdout=holdout)
            if not features and holdout:
                continue
            router = source.matrix.to(stop.weight.device)
            targets = None
            if name in beside:
                targets = _own_logits(name, router, stop, beside[name], holdout=holdout)
            domains.append(Domain(name, features, router, targets))
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
    return CalibrationReport(
        merged="this run's merge" if request.passing else str(request.merged),
        output=str(request.out),
        sources={name: str(ref) for name, ref in request.sources.items()},
        data={name: tuple(map(str, request.data[name])) for name in request.sources},
        settings=settings_data(request.settings),
        device=str(prepared.device),
        dtype=dtype_name(prepared.dtype),
        offload=streams.offload,
        memory=streams.bytes_on_device,
        resumed=loop.resumed,
        layers=tuple(entry.row for entry in loop.journal.entries),
        skipped=prepared.skipped,
        notices=(*prepared.notices, *(n for e in loop.journal.entries for n in e.row["notices"])),
        seconds=seconds,
    )


def _write(prepared: Prepared, journal: Journal, report: CalibrationReport) -> None:
    request = prepared.request
    biases = {pair.place.weight: pair.place.bias for pair in prepared.routers}
    patch = CheckpointPatch(
        prepared.merged.checkpoint,
        request.out,
        overwrite=request.overwrite,
        link=request.passing,
        inputs=_inputs(prepared),
    )
    with patch:
        for entry in journal.entries:
            patch.write(entry.router, entry.weight)
            bias = biases[entry.router]
            if bias is not None and entry.bias is not None:
                shape = prepared.merged.checkpoint.tensors[bias].shape
                patch.write(bias, entry.bias.reshape(shape))
        for name, data in output_files(prepared, report, __version__).items():
            patch.add_bytes(name, data)
        patch.commit()


def _inputs(prepared: Prepared) -> Sequence[Path]:
    return [f for source in prepared.sources.values() for f in source.checkpoint.folders]
