"""Run a request for statistics and write the file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moemerge.checkpoint.output import temporary_sibling
from moemerge.config.models import ModelRef
from moemerge.config.requests import StatisticsRequest
from moemerge.forward.input_hooks import UnitMap
from moemerge.forward.stream import ModelStream
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import Ranks
from moemerge.statistics import Provenance, Statistics, StatisticsWriter
from moemerge.statistics.collecting.fishers import collect_gradients, predicting
from moemerge.statistics.collecting.grams import SUMS, InputCollector
from moemerge.statistics.collecting.job import CollectingJob, CollectRequest, prepare
from moemerge.text.rows import check_files


@dataclass(frozen=True)
class CollectReport:
    """The report of a written file."""

    kind: str
    output: str
    provenance: Provenance
    units: int  # units with statistics
    units_without: int  # norms, biases, embeddings, and those in `notices`
    unvisited_experts: tuple[str, ...]  # units of experts that no token was routed to
    nbytes: int
    seconds: float
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "provenance": self.provenance.model_dump()}


def run_collect(request: CollectRequest, progress: Progress) -> CollectReport:
    """Collect the requested statistics. The file appears complete or not at all.

    Under torchrun each process runs a share of the text, and rank 0 writes.
    """
    begin = time.perf_counter()
    ranks = Ranks.join(resolve_device(request.settings.device))
    progress = ranks.progress(progress)
    job = prepare(request, ranks)
    with _writer(job) if ranks.leads else contextlib.nullcontext() as writer:
        collect = _inputs if request.settings.kind in SUMS else collect_gradients
        notices, unvisited = collect(job, writer, progress)
        if writer is not None:
            job.model.checkpoint.require_unchanged()
            writer.commit(sequences=predicting(job), notices=notices)

    def report() -> CollectReport:
        with Statistics.open(request.out) as written:
            units = len(written.units)
        return CollectReport(
            kind=request.settings.kind,
            output=str(request.out),
            provenance=job.provenance,
            units=units,
            units_without=len(job.model.architecture.units_by_key) - units,
            unvisited_experts=tuple(unvisited),
            nbytes=request.out.stat().st_size,
            seconds=time.perf_counter() - begin,
            notices=(*job.domain.notices, *notices),
        )

    return ranks.call_on_lead(report)


def _writer(job: CollectingJob) -> StatisticsWriter:
    return StatisticsWriter(
        job.request.out,
        kind=job.request.settings.kind,
        provenance=job.provenance,
        keys=job.model.architecture.units_by_key,
        overwrite=job.request.overwrite,
    )


def _inputs(
    job: CollectingJob, writer: StatisticsWriter | None, progress: Progress
) -> tuple[list[str], list[str]]:
    collector = InputCollector(writer, job.request.settings.kind, job.ranks)
    with ModelStream(
        job.model.checkpoint,
        job.batches,
        job.stream,
        on_output=collector.on_output,
        progress=progress,
    ) as stream:
        units = UnitMap(job.model.checkpoint, job.model.architecture, stream.names)
        units.require_experts(stream.input_hooks)
        collector.attach(stream, units)
        for number in stream:
            stream.finish_layer()
            collector.on_layer(number)
        collector.finish()
    return collector.notices, collector.unvisited


@contextlib.contextmanager
def computed_statistics(
    wanted: StatisticsRequest,
    models: Mapping[str, ModelRef],
    out: Path,
    device: str,
    progress: Progress,
    ranks: Ranks,
) -> Iterator[Mapping[str, Sequence[Path]]]:
    """Compute statistics of the models with text; the files exist while the context lasts.

    They are stored next to `out` and equal those of `moemerge stats` with the same settings.
    """
    check_files(wanted.data)
    settings = wanted.settings
    if device != "auto":
        settings = settings.model_copy(update={"device": device})
    with temporary_sibling(out) as folder:
        folder = ranks.broadcast_object(folder)  # on whose disk the files are
        made: dict[str, list[Path]] = {}
        for number, (name, files) in enumerate(wanted.data.items()):
            for kind in wanted.needs[name]:
                file = folder / f"{number}.{kind}.stats"
                request = CollectRequest(
                    model=models[name],
                    out=file,
                    data=files,
                    settings=settings.model_copy(update={"kind": kind}),
                )
                for notice in run_collect(request, progress).notices:
                    progress.note(f"statistics of {name}: {notice}")
                made.setdefault(name, []).append(file)
        yield made
