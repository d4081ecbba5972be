"""The framework of repairs: a repair is a function of a layer.

    @repair("calibrate", prepare=prepare, report=CalibrationReport)
    def calibrate(layer: Layer, settings: CalibrationSettings) -> None:
        for router in layer.routers():                     # all models wait there
            solved = solve(router, settings)
            layer.replace({router.info.weight: solved})    # rounded, used from here on
            layer.report({"layer": layer.number, ...})     # a row of the report

The framework opens the merged model and its sources, runs them on the text layer by layer, calls
the function for every layer, and writes OUT with report and model card. It stores each finished
layer, so that a killed run continues after it. Under torchrun every rank runs a share of the text;
rank 0's results are used everywhere, and only rank 0 writes.

`prepare(job)` runs once, before the first layer. It refuses what cannot be repaired and sets
attributes of the job: which layers, whether the sources run, notices. A repair of the whole model
(`whole=True`) is a function of the job instead and is not called layer by layer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, Generic, TypeVar

from torch import Tensor

from moemerge.checkpoint.patch import Quantised
from moemerge.checkpoint.reader import OverlaidCheckpoint
from moemerge.config.settings import ForwardSettings
from moemerge.errors import NumericalError, ResourceError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.known_configs import require_loadable
from moemerge.forward.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.forward.stops import ModuleStop
from moemerge.forward.stream import ModelStream, Output
from moemerge.forward.walk import Member, Walk, open_walk
from moemerge.repairs.card import output_files
from moemerge.repairs.experts import ExpertMaps, find_maps, maps_json
from moemerge.repairs.inputs import (
    JobText,
    RepairRequest,
    check_names,
    read_text,
    settings_data,
    source_weights,
)
from moemerge.repairs.output import Output as RepairOutput
from moemerge.repairs.output import RefusedResultError
from moemerge.repairs.report import RepairReport
from moemerge.repairs.routers import MERGED, PairedRouter, Router, paired_stops, require_same_family
from moemerge.runtime.devices import is_out_of_memory, resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.runtime.process import disk_bytes_read
from moemerge.runtime.progress import Progress, TimeLeft
from moemerge.runtime.ranks import Ranks, own_device
from moemerge.runtime.timing import Stopwatch
from moemerge.text.batches import Batch, make_batches, own_share
from moemerge.text.domains import Domain
from moemerge.text.rows import check_files

S = TypeVar("S", bound=ForwardSettings)
Row = dict[str, Any]  # of the report, plain JSON data

HEAD: Final = "head"
LAYERS_KEPT: Final = "finished layers are kept if other settings stay the same"
# Settings that the result does not depend on.
NOT_IN_KEY: Final = ("offload", "strict", "measure", "device", "dtype")


@dataclass(frozen=True)
class LayerRepair:
    """A repair as it was declared with `@repair`."""

    verb: str
    function: Callable[[Any, Any], None]  # of a layer (or the job) and the settings
    prepare: Callable[[Job[Any]], None]
    report: type[RepairReport]
    memory: Callable[[Job[Any], Walk], int]
    hints: Callable[[Job[Any]], Sequence[str]]
    strict: Callable[[Row], tuple[str, str] | None]
    quantised: Callable[[Any], Quantised]
    whole: bool

    def __call__(self, at: Any, settings: Any) -> None:
        self.function(at, settings)

    def run(self, request: RepairRequest[Any], progress: Progress) -> RepairReport:
        return run_repair(self, request, progress)


REPAIRS: Final[dict[str, LayerRepair]] = {}  # by verb


def repair(
    verb: str,
    *,
    prepare: Callable[[Job[Any]], None],
    report: type[RepairReport],
    memory: Callable[[Job[Any], Walk], int] = lambda job, walk: 0,
    hints: Callable[[Job[Any]], Sequence[str]] = lambda job: (),
    strict: Callable[[Row], tuple[str, str] | None] = lambda row: None,
    quantised: Callable[[Any], Quantised] = lambda settings: "keep",
    whole: bool = False,
) -> Callable[[Callable[[Any, Any], None]], LayerRepair]:
    """Declare a function as a repair.

    `memory` returns the bytes on the device that it needs besides the models, and `hints` is advice
    if they do not fit. `strict` returns a fault of a row, with advice, that the setting `strict`
    refuses. `quantised` is how changed tensors of a quantised model are stored.
    """

    def declare(function: Callable[[Any, Any], None]) -> LayerRepair:
        REPAIRS[verb] = LayerRepair(
            verb, function, prepare, report, memory, hints, strict, quantised, whole
        )
        return REPAIRS[verb]

    return declare


# --- the job --------------------------------------------------------------------------------------


class Job(Generic[S]):
    """The open models of a repair, their text, and what `prepare` has decided."""

    def __init__(
        self, repair: LayerRepair, request: RepairRequest[S], progress: Progress, ranks: Ranks
    ) -> None:
        """Open the models; refuse wrong names, missing files and mixed families."""
        self.repair = repair
        self.request = request
        self.settings = settings = request.settings
        self.ranks = ranks
        self.progress = progress
        check_names(request.sources, request.data)
        self.weights = source_weights(request.weights, request.sources)  # with a mean of 1
        check_files(request.data)
        check_files(request.check, "check")
        self.merged: OpenModel = open_model(MERGED, request.merged)
        self.sources: dict[str, OpenModel] = {
            name: open_model(name, ref) for name, ref in request.sources.items()
        }
        for source in self.sources.values():
            require_same_family(self.merged, source)
        require_loadable(self.merged)  # layers after the last router are never built here
        self.device = own_device(resolve_device(settings.device))
        dtype = forward_dtype(settings.dtype, self.merged, self.device)
        self.stream = StreamSettings(self.device, dtype, settings.offload)
        self.stopwatch = Stopwatch(self.device)
        self.batch_tokens = batch_tokens(self.merged, self.device)  # padded tokens of a batch
        self.output: RepairOutput  # open before `prepare`
        # For `prepare` to set:
        self.layers: Sequence[int] = range(self.merged.architecture.num_layers)
        self.runs_sources = True
        self.wants_entered = False  # whether `layer.entered` has the merged hidden states
        self.heads = False  # whether the repair is called once more, for the head
        # What the models compute at their end, and what receives it with the model's name.
        self.final: Output | None = None
        self.on_final: Callable[[str, Batch, Tensor], None] = lambda name, batch, value: None
        self.pairs: Sequence[PairedRouter] = ()  # routers with their counterparts, if any is used
        self.notices: list[str] = []
        self.fields: dict[str, Any] = {}  # of the report's class
        self.key: dict[str, Any] = {}  # more that the result depends on
        self.on_open: Callable[[Walk], None] = lambda walk: None  # before any layer runs
        self.state: Any = None  # what the repair keeps from layer to layer besides its report

    @cached_property
    def experts(self) -> ExpertMaps:
        """The maps of sources with more experts than the model."""
        return find_maps(self.merged, list(self.sources.values()), self.request.experts)

    @cached_property
    def text(self) -> JobText:
        request = self.request
        return request.text or read_text(self.merged, self.sources, request.data, self.settings)

    @cached_property
    def all_batches(self) -> tuple[Batch, ...]:
        """The batches of all ranks."""
        return tuple(make_batches(self.text.domains, batch_tokens=self.batch_tokens))

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """The batches of this rank."""
        return tuple(own_share(self.all_batches, self.ranks))

    @property
    def earlier(self) -> list[Row]:
        """The report's rows of all finished layers, also of a run that was killed."""
        return [row for finished in self.output.finished for row in finished.rows]

    def change_settings(self, **values: Any) -> None:
        """Use and report other settings than those of the request."""
        self.settings = self.settings.model_copy(update=values)
        self.request = replace(self.request, settings=self.settings)

    def note(self, notice: str) -> None:
        """Add a notice to the report and print it."""
        self.notices.append(notice)
        self.progress.note(notice)

    def full_key(self) -> dict[str, Any]:
        """Return everything that the result depends on, as plain data."""
        settings = settings_data(self.settings)
        return {
            "repair": self.repair.verb,
            "merged": self.merged.checkpoint.fingerprint(),
            "sources": {n: model.checkpoint.fingerprint() for n, model in self.sources.items()},
            "order": list(self.sources),  # of the sums, which their last bits depend on
            "weights": self.weights,
            "experts": maps_json(self.experts),
            "data": {domain.name: _digest(domain) for domain in self.text.domains},
            "settings": {
                **{name: value for name, value in settings.items() if name not in NOT_IN_KEY},
                "device": self.device.type,
                "dtype": dtype_name(self.stream.dtype),
            },
            "batch_tokens": self.batch_tokens,
            **self.key,
        }


def _digest(domain: Domain) -> str:
    digest = hashlib.sha256()
    for rows in (domain.rows, domain.holdout):
        digest.update(len(rows).to_bytes(8, "little"))
        for row in rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(row.numpy().tobytes())
    return digest.hexdigest()


# --- a layer --------------------------------------------------------------------------------------


class Layer:
    """One decoder layer: the merged model stands before it, and so do the sources, if they run."""

    def __init__(self, job: Job[Any], walk: Walk, number: int, time_left: TimeLeft) -> None:
        self.job = job
        self.number = number
        self.merged: ModelStream = walk.lead
        self.sources = {name: s for name, s in walk.streams.items() if name != MERGED}
        self.is_head = number == len(walk.lead.anatomy.layers)
        self.name = HEAD if self.is_head else f"layer {number}"
        self.path = HEAD if self.is_head else walk.lead.anatomy.layers[number]
        self.rows: list[Row] = []
        self.tensors: dict[str, Tensor] = {}
        self._lines: list[str] = []
        self._walk = walk
        self._time_left = time_left

    @property
    def module(self) -> Any:
        """The layer of the merged model."""
        return self.merged.module(self.path)

    @property
    def earlier(self) -> list[Row]:
        """The report's rows of the layers before. State between layers comes from here alone."""
        return self.job.earlier

    @property
    def entered(self) -> dict[int, Tensor]:
        """The merged model's hidden states before the layer, (tokens, d), by id of the batch."""
        return {id(one.batch): one.given[0] for one in self.merged.entered if one.given}

    def run_to(self, paths: Collection[str]) -> ModuleStop | None:
        """Run the merged model until it stands before one of these modules of the layer.

        Return None if the layer has run to its end.
        """
        return self.merged.run_to(paths)

    def run_sources(self, paths: Collection[str] = ()) -> dict[str, ModuleStop | None]:
        """Run the sources to one of these modules, or the whole layer."""
        return {name: stream.run_to(paths) for name, stream in self.sources.items()}

    def routers(self) -> Iterator[Router]:
        """Run all models to each router of the layer that was paired, in the order they run."""
        pairs = [pair for pair in self.job.pairs if pair.info.layer == self.number]
        for pair, stops in paired_stops(self._walk, pairs):
            yield Router(self.job.merged, self.job.sources, pair, stops.pop(MERGED), stops)

    def replace(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Use these tensors from here on and store them in OUT, by their names on disk.

        They are rounded to their stored dtype, and must be finite then. Return rank 0's.
        """
        infos = self.job.merged.checkpoint.tensors
        rounded = {n: t.detach().cpu().to(infos[n].dtype.torch) for n, t in tensors.items()}
        rounded = self.job.ranks.broadcast_object(rounded)
        for name, tensor in rounded.items():
            if not bool(tensor.isfinite().all()):
                raise NumericalError(f"{name}: the new weights are not finite in {tensor.dtype}")
        self.merged.put(rounded)
        self.store(rounded)
        return rounded

    def store(self, tensors: Mapping[str, Tensor]) -> None:
        """Store these tensors in OUT, which the merged model uses already, rounded as they are."""
        self.tensors.update(tensors)

    def report(self, row: Row, line: str = "") -> None:
        """Add a row to the report; print its notices, and `line` when the layer is finished."""
        row = self.job.ranks.broadcast_object(row)
        for notice in row.get("notices", ()):
            self.job.progress.note(notice)
        refuse_strictly(self.job, row)
        self.rows.append(row)
        self._lines += [line] if line else []

    def save(self) -> None:
        """Store the finished layer."""
        with self.job.stopwatch.span("journal"):
            self.job.output.add(self.name, self.tensors, self.rows)
        self.job.progress.note("; ".join(self._lines or [self.name]) + self._time_left.step())

    @contextmanager
    def errors(self, doing: str, remedy: str = "") -> Iterator[None]:
        """Name the layer in numerical errors, and advise if memory runs out."""
        try:
            yield
        except NumericalError as error:
            raise type(error)(f"{self.name}: {error.message}", hint=error.hint) from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            advice = [remedy, 'lower `max_tokens`, or use `offload="disk"`', LAYERS_KEPT]
            raise ResourceError(
                f"{self.name}: out of memory {doing}", hint="; ".join(filter(None, advice))
            ) from error


def refuse_strictly(job: Job[Any], row: Row) -> None:
    """With the setting `strict`, refuse a faulty row, also of a run without it."""
    fault = job.repair.strict(row)
    if fault is not None and getattr(job.settings, "strict", False):
        raise RefusedResultError(fault[0], hint=fault[1])


# --- running --------------------------------------------------------------------------------------


def run_repair(
    repair: LayerRepair, request: RepairRequest[Any], progress: Progress
) -> RepairReport:
    """Repair into `request.out`, which appears complete or not at all.

    A run that is killed or interrupted leaves its finished layers next to OUT.
    """
    start, read_before = time.perf_counter(), disk_bytes_read()
    ranks = Ranks.join(resolve_device(request.settings.device))
    job = Job(repair, request, ranks.progress(progress), ranks)
    job.output = RepairOutput(
        job.merged.checkpoint,
        request.out,
        others=[model.checkpoint for model in job.sources.values()],
        overwrite=request.overwrite,
        link=request.temporary,
        quantised=repair.quantised(job.settings),
        write=request.write,
        in_background=job.device.type != "cpu",
        ranks=ranks,
    )
    with job.output as output:
        repair.prepare(job)
        for notice in job.notices:
            job.progress.note(notice)
        job.stopwatch.count("text", job.text.seconds)
        job.stopwatch.count("prepare", time.perf_counter() - start - job.text.seconds)
        output.begin(job.full_key(), replace=request.replaces_unfinished)
        if output.resumed:
            job.progress.note(f"resuming a killed run: {output.resumed} layers are finished")
        for row in job.earlier:
            refuse_strictly(job, row)
        repair.function(job, job.settings) if repair.whole else repair_layers(job)
        output.check()
        job.stopwatch.aside("copy", *output.copied)
        report = repair.report.of(job, time.perf_counter() - start)
        for notice in report.closing_notices:
            job.progress.note(notice)
        computed = time.perf_counter()
        if "read" in report.timings.beside:
            files = ranks.total(report.timings.beside["read"][1], job.device)
            disk = ranks.disk_bytes_since(read_before)
            report = replace(report, bytes_read={"files": files, "disk": disk})
        ranks.barrier()  # other ranks may still read the finished layers
        report = report.with_rounding(ranks.broadcast_object(output.write()))
        output.finish(output_files(job.request, job.merged, report))
    timings = report.timings.written(time.perf_counter() - computed, output.copied)
    return replace(report, timings=timings, seconds=time.perf_counter() - start)


def repair_layers(job: Job[Any]) -> None:
    """Call the repair for each of its layers, unless a killed run has finished it."""
    finished = {one.name: one for one in job.output.finished}
    overlay = {
        name: partial(one.tensors.__getitem__, name)
        for one in finished.values()
        for name in one.tensors
    }
    checkpoint = OverlaidCheckpoint(job.merged.checkpoint, overlay)

    def member(name: str, model: OpenModel) -> Member:
        return Member(
            checkpoint if name == MERGED else model.checkpoint,
            None if name == MERGED else (name,),
            job.final or "hidden",
            None if job.final is None else partial(job.on_final, name),
            layer_inputs=name == MERGED and job.wants_entered,
        )

    models = {MERGED: job.merged, **(job.sources if job.runs_sources else {})}
    to_the_end = job.heads or job.final is not None
    time_left = TimeLeft(len(job.layers) + job.heads)
    with open_walk(
        {name: member(name, model) for name, model in models.items()},
        job.batches,
        job.stream,
        job=job.repair.verb,
        last_layer=None if to_the_end else max(job.layers),
        extra=lambda walk: job.repair.memory(job, walk),
        hints=["lower `max_tokens` or `max_length`", *job.repair.hints(job)],
        progress=job.progress,
        stopwatch=job.stopwatch,
    ) as walk:
        job.fields |= {"offload": walk.lead.memory.offload, "memory": walk.process_bytes}
        job.progress.note(walk.start_note(job.repair.verb))
        job.on_open(walk)
        count = 0
        for number in walk:
            count += 1
            if number not in job.layers:
                continue
            if f"layer {number}" in finished:
                time_left.skip()
                continue
            layer = Layer(job, walk, number, time_left)
            job.repair(layer, job.settings)
            layer.save()
        if job.heads and HEAD not in finished:
            layer = Layer(job, walk, count, time_left)
            job.repair(layer, job.settings)
            layer.save()
